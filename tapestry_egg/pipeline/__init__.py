"""TODO tapestry_egg/pipeline"""
