"""TODO tapestry_egg/rewrite"""
