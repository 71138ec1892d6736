"""TODO tapestry_egg/show"""
