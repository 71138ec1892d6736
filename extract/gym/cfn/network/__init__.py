"""TODO extract/gym/cfn/network"""
