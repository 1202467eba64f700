//! What was measured in one case, the bars that it is held against, and both as a table for people.

use std::fmt;
use std::time::Duration;

use pitcrew_sim::plane::{User, VERSION};

use super::audit::Requests;
use super::case::Case;
use super::controller::Usage;

/// With nothing to wait for but the API server, deciding may cost twice as much again as writing.
const FLOORS_MAX: f64 = 3.0;
/// Eight transitions with an Event each, the evictions, the restart, and a little for the rollout.
const WRITES_PER_NODE_MAX: f64 = 20.0;
/// The two looks before the restart, and one for a conflict.
const READS_PER_NODE_MAX: f64 = 3.0;
/// A slot that is given back is taken again within half a visit.
const WAVES_MAX: f64 = 1.5;

/// One case's figures.
pub(super) struct Figures {
    pub(super) case: Case,
    /// From the version patch to the last node that is done.
    pub(super) wall: Duration,
    /// From the version patch until the controller has nothing more to say.
    pub(super) requests: Requests,
    /// Writes in the same time by those who make, place, run and remove the pods.
    pub(super) others: Vec<(User, usize)>,
    /// For a while after that.
    pub(super) idle: Requests,
    pub(super) idle_time: Duration,
    pub(super) most_out: usize,
    /// Cordon to done of each node, shortest first.
    pub(super) visits: Vec<Duration>,
    /// The same for one node while all others stay where they are.
    pub(super) visit_alone: Duration,
    pub(super) before: Usage,
    pub(super) after: Usage,
    /// The same writes from a bare client.
    pub(super) floor_writes: Duration,
    /// What the pods take by themselves: workload stop, driver stop, driver start.
    pub(super) pods_own: Duration,
    pub(super) record_bytes: usize,
}

/// A bar, and whether it holds.
pub(super) struct Bar {
    pub(super) holds: bool,
    what: String,
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of thousands, shown with two digits")]
fn per(count: usize, of: usize) -> f64 {
    count as f64 / of.max(1) as f64
}

impl Figures {
    fn nodes(&self) -> usize {
        self.case.nodes as usize
    }

    fn floor(&self) -> Duration {
        self.floor_writes + self.pods_own
    }

    /// What this case is held against.
    pub(super) fn bars(&self) -> Vec<Bar> {
        let idle = self.idle.writes_total() + self.idle.reads_total();
        let idle_what = format!("{idle} requests in {} idle seconds, at most 0", self.idle_time.as_secs());
        let mut bars = vec![self.pace(), Bar { holds: idle == 0, what: idle_what }];
        // With a limit, evicted pods land on nodes that are still to go, and leave those too.
        if self.case.max_parallel == 0 {
            let writes = per(self.requests.writes_total(), self.nodes());
            let reads = per(self.requests.reads_total(), self.nodes());
            let bar = |rate: f64, limit: f64, what: &str| Bar {
                holds: rate <= limit,
                what: format!("{rate:.2} {what} per node, at most {limit}"),
            };
            bars.push(bar(writes, WRITES_PER_NODE_MAX, "writes"));
            bars.push(bar(reads, READS_PER_NODE_MAX, "reads"));
        }
        bars
    }

    /// Without a limit of its own the API server is what it waits for, with one the nodes' visits are.
    fn pace(&self) -> Bar {
        let wall = self.wall.as_secs_f64();
        if self.case.max_parallel == 0 {
            let floors = wall / self.floor().as_secs_f64();
            let what = format!("wall time is {floors:.2} floors, at most {FLOORS_MAX}");
            return Bar { holds: floors <= FLOORS_MAX, what };
        }
        let visits = wall / self.visit_alone.as_secs_f64();
        let limit = WAVES_MAX * f64::from(self.case.nodes.div_ceil(self.case.max_parallel));
        let what = format!("wall time is {visits:.2} visits of one node alone, at most {limit}");
        Bar { holds: visits <= limit, what }
    }
}

/// One line of the table.
fn row(f: &mut fmt::Formatter<'_>, what: &str, value: impl fmt::Display, remark: &str) -> fmt::Result {
    let line = format!("  {what:<34} {value:>10}  {remark}");
    writeln!(f, "{}", line.trim_end())
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { nodes, max_parallel } = self.case;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        writeln!(
            f,
            "\n{nodes} nodes, maxParallelUpgrades {max_parallel}, maxUnavailable 100% \
             (Kubernetes {VERSION}, etcd without fsync, {cores} cores for everything)\n"
        )?;
        self.time(f)?;
        self.api(f)?;
        self.machine(f)?;
        self.lower_bound(f)?;
        writeln!(f)?;
        for bar in self.bars() {
            writeln!(f, "  {}  {bar}", if bar.holds { "holds " } else { "MISSED" })?;
        }
        Ok(())
    }
}

/// The parts of the table.
impl Figures {
    fn time(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "wall time", seconds(self.wall), "version patch to the last node upgrade-done")?;
        row(f, "most nodes out at once", self.most_out, "from a watch of the nodes")?;
        let at = |index: usize| self.visits.get(index).map_or_else(String::new, |visit| seconds(*visit));
        row(f, "one node's visit, shortest", at(0), "cordon to upgrade-done, from a watch of the nodes")?;
        row(f, "one node's visit, median", at(self.visits.len() / 2), "")?;
        row(f, "one node's visit, longest", at(self.visits.len().saturating_sub(1)), "")?;
        row(
            f,
            "one node's visit, alone",
            seconds(self.visit_alone),
            "one more version, a node with work on it, all others skipped",
        )
    }

    fn api(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Requests { writes, reads, watches, refused, evicted } = &self.requests;
        let rate = |count: usize| format!("{:.2}", per(count, self.nodes()));
        row(f, "API writes per node", rate(self.requests.writes_total()), "audit log, leases apart")?;
        for (kind, count) in writes {
            row(f, &format!("  {kind}"), rate(*count), "")?;
        }
        row(f, "  of these refused", rate(*refused), "conflicts and budgets; they count as writes")?;
        for (user, count) in &self.others {
            let who = user.name().trim_start_matches("system:");
            row(
                f,
                &format!("  (by {who})"),
                rate(*count),
                "in the same time, not ours and not in the floor",
            )?;
        }
        row(f, "API reads per node", rate(self.requests.reads_total()), "get and list, leases apart")?;
        for (kind, count) in reads {
            row(f, &format!("  {kind}"), rate(*count), "")?;
        }
        row(f, "watches begun", watches, "in all; each is begun again every few minutes")?;
        let evictions = self.requests.evictions();
        let remark = format!("{evictions} evictions of {} pods", evicted.len());
        row(f, "evictions per evicted pod", format!("{:.2}", per(evictions, evicted.len())), &remark)?;
        let idle = self.idle.writes_total() + self.idle.reads_total();
        let remark =
            format!("in {} s after the end, {} watches apart", self.idle_time.as_secs(), self.idle.watches);
        row(f, "idle requests", idle, &remark)
    }

    fn machine(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "controller's peak memory", format!("{:.1} MiB", self.after.peak_mib), "VmHWM")?;
        let cpu = self.after.cpu_seconds - self.before.cpu_seconds;
        row(f, "controller's CPU time", format!("{cpu:.2} s"), "for the whole rollout, user and system")
    }

    fn lower_bound(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let writes = self.requests.writes_total();
        let remark = format!(
            "a bare client, 64 in flight, the same {writes} writes: node patches of {} bytes, Events,",
            self.record_bytes
        );
        row(f, "floor: writes", seconds(self.floor_writes), &remark)?;
        row(f, "", "", "evictions and deletions of unbound pods; ConfigMaps for the rest")?;
        row(
            f,
            "floor: the pods' own time",
            seconds(self.pods_own),
            "workload stop, driver stop, driver start",
        )?;
        row(f, "floor", seconds(self.floor()), "")?;
        row(
            f,
            "wall time / floor",
            format!("{:.2}", self.wall.as_secs_f64() / self.floor().as_secs_f64()),
            "",
        )
    }
}
