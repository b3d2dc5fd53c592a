"""An all-ones mask beside positions.

masks: transformers#46634

Positions split the mask into documents only if no attention mask and no cache come with them. A
mask of ones, which collators hand out unasked, joins all documents again.
"""

stock = ("llama",)
