//! The kernel's services: descriptors, io_uring, the clock.

use super::clock::ClockState;
use super::{Finding, Subject, note, ok, problem, warning};
use crate::output::count;
use larder_node::limits::SessionLimits;

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    vec![open_files(subject), io_uring(subject), clock(subject)]
}

/// Checks the limit of descriptors: extents, windows, sessions and processes take one each. The node raises its own limit up to
/// the hard one.
fn open_files(subject: &Subject) -> Finding {
    const CHECK: &str = "open files";
    let limit = subject.host.open_files;
    if limit == u64::MAX {
        return ok(CHECK, "unlimited");
    }
    let extents: u64 =
        subject.limits.iter().flat_map(|limits| &limits.actors).map(|a| u64::from(a.arena.extents)).sum();
    let sessions = u64::from(subject.config.session.max_sessions)
        * subject.config.tenants.len() as u64
        * SessionLimits::DESCRIPTORS;
    let lingering =
        u64::from(subject.config.session.max_lingering_processes) * subject.config.tenants.len() as u64;
    let needed = extents + sessions + lingering + OTHER_FILES;
    let enough = needed.max(sessions * SessionLimits::DESCRIPTORS_SHARE).next_power_of_two();
    if limit < needed {
        let found = format!("{} may be open, the node may need {}", count(limit), count(needed));
        return problem(CHECK, found, format!("raise the hard limit (LimitNOFILE={enough})"));
    }
    if let Some(shortage) = subject.limits.as_ref().ok().and_then(|limits| limits.session.shortage()) {
        let found = format!("{} may be open: {shortage}", count(limit));
        return warning(CHECK, found, format!("raise the hard limit (LimitNOFILE={enough})"));
    }
    ok(CHECK, format!("{} may be open, the node needs {} at most", count(limit), count(needed)))
}

fn io_uring(subject: &Subject) -> Finding {
    const CHECK: &str = "io_uring";
    let disabled = subject.files.number("proc/sys/kernel/io_uring_disabled").unwrap_or(0);
    match &subject.probes.io_uring {
        _ if disabled == 2 => warning(
            CHECK,
            "the system forbids it (kernel.io_uring_disabled=2): disk transfers go one at a time",
            "`sysctl kernel.io_uring_disabled=0`, or 1 with kernel.io_uring_group set to the node's group",
        ),
        Err(error) => warning(
            CHECK,
            format!("io_uring cannot be set up ({error}): disk transfers go one at a time"),
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile",
        ),
        Ok(()) => ok(CHECK, "a ring can be set up"),
    }
}

/// Checks the clock: certificates are judged by it, and the incarnation of a node grows with it.
fn clock(subject: &Subject) -> Finding {
    const CHECK: &str = "clock";
    let advice =
        "run chrony or systemd-timesyncd: certificates and incarnations of nodes depend on the clock";
    match subject.probes.clock {
        None => note(CHECK, "the kernel does not say whether anything keeps the clock right", advice),
        Some(ClockState::Unsynchronised) => warning(CHECK, "nothing keeps it right", advice),
        Some(ClockState::Synchronised { error_us }) if error_us > MOST_ERROR_US => {
            warning(CHECK, format!("the clock may be off by {:.1} s", error_us as f64 / 1e6), advice)
        }
        Some(ClockState::Synchronised { error_us }) => {
            ok(CHECK, format!("synchronised to within {:.1} ms", error_us as f64 / 1e3))
        }
    }
}

/// Other descriptors: logs, HTTP, the directory, libraries.
const OTHER_FILES: u64 = 256;

/// Far more than the error of any clock that is kept right.
const MOST_ERROR_US: u64 = 5_000_000;
