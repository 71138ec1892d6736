"""TODO tapestry_egg/egraphs"""
