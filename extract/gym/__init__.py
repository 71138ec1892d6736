"""TODO extract/gym"""
