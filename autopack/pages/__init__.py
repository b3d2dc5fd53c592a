"""HTML of what is found: the pieces that notebooks show, and the pages that commands write of the
same pieces."""
