"""What pyproject.toml cannot say: a wheel carries the journals of tuning_logs/, so that what is installed builds with
the best configs that were measured.  A checkout has them beside the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
JOURNALS = "tuning_logs/*/*.jsonl"


class BuildWithJournals(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self.journals():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        journals = [] if self.editable_mode else [str(target) for _, target in self.journals()]
        return [*super().get_outputs(include_bytecode), *journals]

    def journals(self) -> list[tuple[Path, Path]]:
        """Every journal, and where it goes."""
        package = Path(self.build_lib) / "schedules"
        return [(file, package / file.relative_to(HERE)) for file in sorted(HERE.glob(JOURNALS))]


setup(cmdclass={"build_py": BuildWithJournals})
