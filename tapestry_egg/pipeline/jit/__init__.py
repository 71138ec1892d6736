"""TODO tapestry_egg/pipeline/jit"""
