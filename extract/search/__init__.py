"""TODO extract/search"""
