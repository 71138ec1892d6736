"""TODO tapestry_egg/metakernels/signatures"""
