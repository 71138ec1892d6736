"""TODO tapestry_egg/schedule"""
