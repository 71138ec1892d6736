"""TODO tapestry_egg/metakernels/language"""
