"""What `pip install .` takes besides the packages: assets/ and configs/, as data of the package decode.

An install has no folders beside its packages; decode/common/files.py finds them in both. Setuptools reads this by the
`cmdclass` of pyproject.toml; nothing else imports it.
"""

from pathlib import Path

from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """Copies both folders, of those that are there, into decode/bundled; not for an editable install."""

    def files(self) -> list[str]:
        """Every file of the two folders, from the root of the checkout."""
        found = (path for name in ("assets", "configs") for path in Path(name).rglob("*"))
        return sorted(str(path) for path in found if path.is_file())

    def run(self) -> None:
        super().run()
        for file in [] if self.editable_mode else self.files():
            place = Path(self.build_lib, "decode", "bundled", file)
            self.mkpath(str(place.parent))
            self.copy_file(file, str(place))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self.files()]
