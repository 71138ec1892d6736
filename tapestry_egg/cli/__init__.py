"""TODO tapestry_egg/cli"""
