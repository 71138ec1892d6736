"""TODO tapestry_egg/graph"""
