"""Files: programs, plans and fronts as JSON with a version, certified when read, never executed.

In: a path, or bytes of another process. Out: the records, or an error with the place in the file.
The plan cache keeps fronts here by the fingerprints of what they were planned for.
"""
