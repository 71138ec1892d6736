"""TODO tapestry_egg/files"""
