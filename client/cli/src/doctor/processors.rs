//! Processors and NUMA: whether threads and memory can be near each other, and run.

use super::{Finding, Subject, note, ok, warning};

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings = numa(subject);
    findings.extend([balancing(subject), quota(subject)]);
    findings
}

fn numa(subject: &Subject) -> Vec<Finding> {
    const CHECK: &str = "NUMA";
    let nodes = subject.host.numa_nodes.len();
    let mismatches = subject.limits.iter().flat_map(|limits| &limits.mismatches);
    let advice = "check the firmware's NUMA settings, the slot of the GPU, and the cpuset of this process";
    let found: Vec<Finding> =
        mismatches.map(|mismatch| warning(CHECK, mismatch.to_string(), advice)).collect();
    if !found.is_empty() {
        return found;
    }
    let near = subject.limits.iter().flat_map(|limits| &limits.actors);
    let near = near.filter_map(|actor| Some(format!("{} is near {}", actor.interface.as_ref()?, actor.pci?)));
    let near: Vec<String> = near.collect();
    let near = if near.is_empty() { String::new() } else { format!("; {}", near.join(", ")) };
    let nodes = if nodes == 1 { "1 NUMA node".to_owned() } else { format!("{nodes} NUMA nodes") };
    let gpus = &subject.config.gpus;
    if gpus.is_empty() && subject.host.numa_nodes.len() > 1 {
        let found = format!("{nodes}, and no [[gpus]]: one actor, with threads and memory on any node");
        return vec![note(CHECK, found, "name the GPUs in the configuration: each gets an actor near it")];
    }
    vec![ok(CHECK, format!("{nodes}{near}"))]
}

/// Checks whether the kernel moves pages after the threads that touch them: useless work for an arena that is bound to its NUMA
/// node.
fn balancing(subject: &Subject) -> Finding {
    const CHECK: &str = "NUMA balancing";
    let on = subject.files.number("proc/sys/kernel/numa_balancing").is_some_and(|mode| mode != 0);
    if on && subject.host.numa_nodes.len() > 1 {
        let found = "the kernel searches for pages to move, and stalls their users";
        return warning(
            CHECK,
            found,
            "`sysctl kernel.numa_balancing=0`: threads and memory are placed already",
        );
    }
    ok(CHECK, if on { "on, of no effect with one NUMA node" } else { "off" })
}

/// Checks the CPU quota: a process that has used it up stands still for the rest of each period.
fn quota(subject: &Subject) -> Finding {
    const CHECK: &str = "CPU quota";
    let v2 = subject.files.groups("cpu", "cpu.max", "-");
    let of_v2 = v2.iter().filter_map(|text| {
        let (quota, period) = text.trim().split_once(' ')?;
        Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
    });
    let quotas = subject.files.groups("cpu", "-", "cpu.cfs_quota_us");
    let periods = subject.files.groups("cpu", "-", "cpu.cfs_period_us");
    let of_v1 = quotas.iter().zip(&periods).filter_map(|(quota, period)| {
        let quota = quota.trim().parse::<f64>().ok().filter(|&quota| quota > 0.0)?;
        Some(quota / period.trim().parse::<f64>().ok()?)
    });
    let Some(cpus) = of_v2.chain(of_v1).min_by(f64::total_cmp) else { return ok(CHECK, "none") };
    let actors = subject.limits.iter().flat_map(|limits| &limits.actors);
    let threads = actors.map(|actor| 1 + actor.copy.threads).sum::<usize>() + OTHER_THREADS;
    if cpus < threads as f64 {
        let found = format!(
            "{cpus:.1} CPUs for {threads} threads that work at a time: they stall when the quota is used up"
        );
        return warning(CHECK, found, format!("take the quota away, or raise it to {threads} CPUs"));
    }
    ok(CHECK, format!("{cpus:.1} CPUs for {threads} threads that work at a time"))
}

/// The thread for other nodes, and the thread that accepts sessions.
const OTHER_THREADS: usize = 2;
