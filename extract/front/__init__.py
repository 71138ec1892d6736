"""TODO extract/front"""
