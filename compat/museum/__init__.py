"""The museum of leaks: mistakes that were really made, each made again on something tiny, and what
the auditor says."""
