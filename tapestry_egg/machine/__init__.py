"""TODO tapestry_egg/machine"""
