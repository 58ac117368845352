from draftline.cli import Command
