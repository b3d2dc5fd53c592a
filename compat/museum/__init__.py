"""The museum of leaks: mistakes that were really made, each made again on something tiny, and the auditor's word on it."""
