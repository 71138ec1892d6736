"""TODO tapestry_egg/parallel"""
