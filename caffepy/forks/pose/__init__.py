"""Nets that find the joints of people: CPM and OpenPose."""
