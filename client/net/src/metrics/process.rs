//! The resources that a server takes from its machine, under the names that every Prometheus client uses.

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

crate::metrics_table! {
    /// The metrics of this process.
    pub struct ProcessMetrics: "Process", "" => {
        cpu: Counter = "process_cpu_seconds_total", "seconds", [], "CPU time of the process, in the kernel and outside";
        resident: IntGauge = "process_resident_memory_bytes", "bytes", [], "Resident memory of the process, the arena's pages included";
        open_files: IntGauge = "process_open_fds", "descriptors", [], "Open file descriptors";
        most_files: IntGauge = "process_max_fds", "descriptors", [], "Limit of open file descriptors";
        threads: IntGauge = "process_threads", "threads", [], "Threads";
        start: Gauge = "process_start_time_seconds", "seconds", [], "Time at which the process started, since 1970";
    }
}

/// Fields of `/proc/self/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Stat {
    cpu_ticks: u64,
    threads: u64,
    resident_pages: u64,
    /// From the start of the machine to the start of the process.
    start_ticks: u64,
}

impl ProcessMetrics {
    /// Brings the metrics up to date. A value that the kernel does not tell stays as it was.
    pub fn show(&self) {
        if let Ok(entries) = fs::read_dir("/proc/self/fd") {
            // The directory itself is open now too.
            self.open_files.set(entries.count().saturating_sub(1) as i64);
        }
        let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.most_files.set(i64::try_from(most).unwrap_or(i64::MAX));
        let Some(stat) = fs::read_to_string("/proc/self/stat").ok().and_then(|text| parse(&text)) else {
            return;
        };
        let ticks = clock_ticks_per_second() as f64;
        // Two calls at the same time must not make the counter shrink.
        self.cpu.inc_by((stat.cpu_ticks as f64 / ticks - self.cpu.get()).max(0.0));
        self.threads.set(stat.threads as i64);
        self.resident.set((stat.resident_pages * page_size() as u64) as i64);
        if let Some(booted) = fs::read_to_string("/proc/stat").ok().and_then(|text| boot_time(&text)) {
            self.start.set(booted + stat.start_ticks as f64 / ticks);
        }
    }
}

/// Reads `/proc/self/stat` (proc(5)); a program's name may have spaces and brackets.
fn parse(text: &str) -> Option<Stat> {
    let after_name = text.rsplit_once(')')?.1;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // The first of these fields is field 3, the state.
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Stat {
        cpu_ticks: field(14)? + field(15)?,
        threads: field(20)?,
        start_ticks: field(22)?,
        resident_pages: field(24)?,
    })
}

/// Seconds from 1970 to the start of the machine, from `/proc/stat`.
fn boot_time(text: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::metrics::Part as _;

    #[test]
    fn the_kernels_line_is_read_whatever_the_program_is_called() {
        let line = "77 (a) b (c) S 1 77 77 0 -1 4194304 9 0 0 0 120 30 0 0 20 0 12 0 5000 99 64 184 1 2 3";
        let stat = Stat { cpu_ticks: 150, threads: 12, start_ticks: 5_000, resident_pages: 64 };
        assert_eq!(parse(line), Some(stat));
        assert_eq!(parse("nonsense"), None);
        assert_eq!(boot_time("cpu 1 2\nbtime 1700000000\n"), Some(1.7e9));
    }

    #[test]
    fn a_process_has_memory_files_threads_and_a_start() {
        let metrics = ProcessMetrics::register(&Registry::new()).unwrap();
        metrics.show();
        assert!(metrics.resident.get() > 0 && metrics.threads.get() > 0 && metrics.start.get() > 1e9);
        assert!(metrics.open_files.get() > 0 && metrics.open_files.get() <= metrics.most_files.get());
    }
}
