//! Memory: whether the arena fits, its pages, and limits that may take its memory away.

use larder_node::arena::HugePages;
use larder_node::host::HUGE_PAGE_BYTES;

use super::{Finding, Subject, note, ok, problem, warning};
use crate::output::bytes;

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings = if subject.probes.node_runs {
        vec![ok(
            "memory",
            "the node runs and has its arena: `larder status --json` shows its pages and their place",
        )]
    } else {
        vec![available(subject), huge_pages(subject), transparent_huge_pages(subject), shared(subject)]
    };
    findings.extend([locked(subject), swap(subject)]);
    findings
}

/// Checks the available memory: the node takes the arena at start, and is killed if it is not available.
fn available(subject: &Subject) -> Finding {
    let (arena, huge) = (subject.arena_bytes(), expected_huge_bytes(subject));
    let ordinary = arena - huge;
    let free = subject.host.available_bytes;
    let group = subject.host.cgroup_limit_bytes;
    if ordinary > free {
        let found =
            format!("the arena takes {} in ordinary pages, {} are available", bytes(ordinary), bytes(free));
        return problem("memory", found, "lower [host] arena_bytes, or end programs that use the memory");
    }
    if let Some(limit) = group.filter(|limit| ordinary > limit / 10 * 9) {
        let found = format!("the arena takes {} of the control group's {}", bytes(ordinary), bytes(limit));
        return warning(
            "memory",
            found,
            "raise the group's memory limit: write windows and the rest need a tenth beside the arena",
        );
    }
    ok("memory", format!("the arena takes {}, {} are available", bytes(arena), bytes(free)))
}

fn huge_pages(subject: &Subject) -> Finding {
    const CHECK: &str = "huge pages";
    let (arena, huge) = (subject.arena_bytes(), expected_huge_bytes(subject));
    if subject.config.host.huge_pages == HugePages::Never {
        return note(
            CHECK,
            "the configuration wants none",
            "set [host] huge_pages = \"auto\": copies are faster",
        );
    }
    if arena.saturating_sub(huge) < HUGE_PAGE_BYTES {
        return ok(CHECK, format!("all {} of the arena are reserved", bytes(arena)));
    }
    let pages = subject.host.huge.total_bytes / HUGE_PAGE_BYTES + (arena - huge).div_ceil(HUGE_PAGE_BYTES);
    let found = format!("{} of the arena's {} are reserved and free", bytes(huge), bytes(arena));
    let nodes =
        if subject.host.numa_nodes.len() > 1 { ", and see that each NUMA node gets its part" } else { "" };
    warning(CHECK, found, format!("`sysctl vm.nr_hugepages={pages}`, best at boot{nodes}"))
}

/// Checks transparent huge pages, if the reserved huge pages do not suffice.
fn transparent_huge_pages(subject: &Subject) -> Finding {
    const CHECK: &str = "transparent huge pages";
    let file = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let suffices = subject.arena_bytes().saturating_sub(expected_huge_bytes(subject)) < HUGE_PAGE_BYTES;
    match subject.files.choice(file) {
        _ if subject.config.host.huge_pages == HugePages::Never => ok(CHECK, "the configuration wants none"),
        Some(choice) if matches!(choice.as_str(), "never" | "deny") && !suffices => warning(
            CHECK,
            format!("memory files get no huge pages ({choice}), and the reserved ones do not suffice"),
            format!("write `advise` to /{file}"),
        ),
        Some(choice) => ok(CHECK, format!("for memory files: {choice}")),
        None => note(CHECK, "the kernel has no huge pages for memory files", "reserve huge pages instead"),
    }
}

/// Checks the limit of locked memory: memory that engines and io_uring pin counts.
fn locked(subject: &Subject) -> Finding {
    const CHECK: &str = "memlock";
    let arena = subject.arena_bytes();
    match subject.files.hard_limit("Max locked memory") {
        Some(limit) if limit < arena && !subject.files.has_capability(CAP_IPC_LOCK) => warning(
            CHECK,
            format!("at most {} may be locked, the arena has {}", bytes(limit), bytes(arena)),
            "raise the limit of locked memory (LimitMEMLOCK=infinity): pinning the arena for a device may fail",
        ),
        Some(limit) if limit < arena => {
            ok(CHECK, format!("the limit of {} does not bind this user (CAP_IPC_LOCK)", bytes(limit)))
        }
        Some(limit) => ok(CHECK, format!("{} may be locked", bytes(limit))),
        None => ok(CHECK, "unlimited"),
    }
}

/// Checks the limits of memory files and mappings, of which the arena consists.
fn shared(subject: &Subject) -> Finding {
    const CHECK: &str = "shared memory";
    if subject.files.number("proc/sys/vm/memfd_noexec") == Some(2) {
        let advice = "`sysctl vm.memfd_noexec=1`, or 0";
        return problem(CHECK, "memory files like the arena's are refused (vm.memfd_noexec=2)", advice);
    }
    if subject.files.number("proc/sys/vm/overcommit_memory") == Some(2) {
        let limit = subject.files.meminfo("CommitLimit").unwrap_or(u64::MAX);
        let left = limit.saturating_sub(subject.files.meminfo("Committed_AS").unwrap_or(0));
        let ordinary = subject.arena_bytes() - expected_huge_bytes(subject);
        if left < ordinary {
            let found = format!(
                "{} may still be promised (vm.overcommit_memory=2), the arena takes {}",
                bytes(left),
                bytes(ordinary)
            );
            return problem(CHECK, found, "`sysctl vm.overcommit_memory=0`, or raise vm.overcommit_ratio");
        }
    }
    let extents: u64 =
        subject.limits.iter().flat_map(|limits| &limits.actors).map(|a| u64::from(a.arena.extents)).sum();
    let maps = subject.files.number("proc/sys/vm/max_map_count").unwrap_or(u64::MAX);
    if extents + OTHER_MAPPINGS > maps {
        let found = format!("the arena has {extents} extents, a process may map {maps} (vm.max_map_count)");
        return problem(CHECK, found, "raise [host] extent_bytes, or `sysctl vm.max_map_count=262144`");
    }
    ok(CHECK, "nothing limits memory files")
}

fn swap(subject: &Subject) -> Finding {
    const CHECK: &str = "swap";
    let areas = subject.files.text("proc/swaps").unwrap_or_default().lines().skip(1).count();
    let forbidden =
        subject.files.groups("memory", "memory.swap.max", "-").iter().any(|max| max.trim() == "0");
    if areas == 0 || forbidden {
        return ok(CHECK, if areas == 0 { "none" } else { "the control group forbids it to this process" });
    }
    warning(
        CHECK,
        "the system can swap the arena out, and a hit then waits for a disk",
        "`swapoff -a`, or MemorySwapMax=0 for the service; huge pages are never swapped",
    )
}

/// Bytes of the arena that will be in huge pages, as far as they are free now.
fn expected_huge_bytes(subject: &Subject) -> u64 {
    let wanted = subject.config.host.huge_pages == HugePages::Auto;
    if wanted { subject.arena_bytes().min(subject.host.huge.free_bytes) } else { 0 }
}

/// A process with this capability locks memory without limit.
const CAP_IPC_LOCK: u32 = 14;

/// Mappings that a node has beside its arena: libraries, stacks, write windows.
const OTHER_MAPPINGS: u64 = 2_000;
