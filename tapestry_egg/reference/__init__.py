"""TODO tapestry_egg/reference"""
