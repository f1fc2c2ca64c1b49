"""The kernels of a report: what each uses of the device, and its story from the definition to the source.

A kernel is built anew from the best record, or read from a bundle of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedules.build.builder import build
from schedules.build.inspect import VIEWS, Summary, available, summary
from schedules.build.present import device_name
from schedules.bundle.bundle import MANIFEST, Bundle
from schedules.bundle.export import holds
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import BundleError, SchedulesError
from schedules.core.problem import Config, Problem
from schedules.show.explain import Story, story
from schedules.show.report.data import Study

SOURCES = ("cuda", "amdgcn", "asm")  # the views that are a kernel's generated source


@dataclass(frozen=True)
class ReportedKernel:
    """One kernel: `origin` says where it is from; what could not be had is None or "", and `notes` say why.

    `source` is a bundle's own generated source, shown where there is no `story`; `measured` what a bundle keeps of its
    time.
    """

    operator: str
    problem: Problem
    arch: Arch
    schedule: str
    config: Mapping[str, Any]
    origin: str
    resources: Summary | None = None
    story: Story | None = field(default=None, repr=False)
    source: str = field(default="", repr=False)
    measured: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def open_bundles(paths: Sequence[str | Path]) -> list[Bundle]:
    """The bundles that `paths` are, or hold in folders below.  Raises BundleError, also for a folder without any."""
    found: list[Bundle] = []
    for path in map(Path, paths):
        folders = [path] if (path / MANIFEST).exists() else sorted(file.parent for file in path.rglob(MANIFEST))
        if not folders:
            raise BundleError(f"{path} is no bundle and holds none; give a folder that `schedules export` wrote")
        found += [Bundle.open(folder) for folder in folders]
    return found


def study_kernel(study: Study, bundles: Sequence[Bundle], sources: bool) -> ReportedKernel | None:
    """The best kernel of `study`: from the bundle that holds it, else, with `sources`, built here.

    None where nothing was correct.  What fails is told in the kernel's notes.
    """
    best = study.summary.best
    if best is None:
        return None
    arch = parse_arch(best.target)
    bundle = next((bundle for bundle in bundles if holds(bundle, best, arch)), None)
    if bundle:
        return bundle_kernel(bundle, sources)
    resources, notes = None, []
    foreign = not arch.is_gpu and best.device != device_name(arch)
    if foreign:
        notes.append(f"not built here: the code is for the CPU {best.device}")
    elif sources:
        try:
            resources = summary(build(best.problem, arch, best.schedule, best.config))
        except SchedulesError as error:  # of an older version's config, or of a compiler that is not here
            notes.append(f"not built here: {error}")
    told = _story(best.problem, arch, best.schedule, best.config, notes) if sources and not foreign else None
    return ReportedKernel(
        operator=best.operator,
        problem=best.problem,
        arch=arch,
        schedule=best.schedule,
        config=best.config.to_json(),
        origin="built for this report" if resources else "",
        resources=resources,
        story=told,
        notes=tuple(notes),
    )


def bundle_kernel(bundle: Bundle, sources: bool) -> ReportedKernel:
    """The kernel of a bundle, as it was exported; with `sources` its story, told by this version."""
    manifest, notes = bundle.manifest, list[str]()
    material = bundle.material()
    spec = bundle.operator.schedule(manifest["schedule"])
    told = None
    if sources:
        try:
            config = spec.config.parse(manifest["config"])
            told = _story(bundle.problem, bundle.arch, spec.name, config, notes)
        except SchedulesError as error:
            notes.append(f"no steps: {error}")
    views = [name for name in SOURCES if sources and name in available(material)]
    return ReportedKernel(
        operator=bundle.operator.name,
        problem=bundle.problem,
        arch=bundle.arch,
        schedule=spec.name,
        config=manifest["config"],
        origin=f"bundle {bundle.path}",
        resources=summary(material),
        story=told,
        source=next((VIEWS[name].get(material) or "" for name in views), ""),
        measured=manifest["measured"],
        notes=tuple(notes),
    )


def _story(problem: Problem, arch: Arch, schedule: str, config: Config, notes: list[str]) -> Story | None:
    try:
        return story(problem, arch, schedule, config)
    except SchedulesError as error:
        notes.append(f"no steps: {error}")
        return None
