//! A workload pod as proptest draws it.

use proptest::prelude::*;

use super::super::fixture::*;
use crate::snapshot::Phase;

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(super) struct PodSketch {
    bare: bool,
    empty_dir: bool,
    daemon: bool,
    budgeted: bool,
    drain_skip: bool,
    gpus: u32,
    phase: Phase,
    /// It came only now.
    new: bool,
    /// One of a job's, which may have others elsewhere.
    job: Option<u8>,
}

pub(super) fn pods() -> impl Strategy<Value = PodSketch> {
    let phase =
        prop_oneof![6 => Just(Phase::Running), 1 => Just(Phase::Pending), 1 => Just(Phase::Succeeded)];
    let rarely = || prop::bool::weighted(0.15);
    let job = prop::option::weighted(0.3, 0..2_u8);
    (rarely(), rarely(), rarely(), any::<bool>(), rarely(), 0..3_u32, phase, rarely(), job).prop_map(
        |(bare, empty_dir, daemon, budgeted, drain_skip, gpus, phase, new, job)| PodSketch {
            bare,
            empty_dir,
            daemon,
            budgeted,
            drain_skip,
            gpus,
            phase,
            new,
            job,
        },
    )
}

impl PodSketch {
    pub(super) fn spec(&self, name: &str) -> PodSpec {
        let mut spec = pod(name).gpus(self.gpus).phase(self.phase);
        if let Some(job) = self.job {
            spec = spec.of_job(&format!("job-{job}"));
        }
        if self.bare {
            spec = spec.bare();
        }
        if self.daemon {
            spec = spec.of_daemon_set();
        }
        if self.empty_dir {
            spec = spec.with_empty_dir();
        }
        if self.budgeted {
            spec = spec.label("app", "web");
        }
        if self.drain_skip {
            spec = spec.label(&keys("gpu").drain_skip, "true");
        }
        if self.new { spec.created(noon()) } else { spec }
    }
}
