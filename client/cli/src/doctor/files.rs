//! The kernel's files, below a root.

use std::path::{Path, PathBuf};

use larder_node::host::cgroup;

/// The kernel's files.
#[derive(Debug, Clone)]
pub(crate) struct Files(PathBuf);

impl Files {
    /// The files below `root`: `/` for this machine.
    pub(crate) fn below(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// A file's text; `None` if there is none, or it may not be read.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        Some(std::fs::read_to_string(self.0.join(path)).ok()?.trim().to_owned())
    }

    /// Whether the file exists.
    pub(super) fn is_there(&self, path: &str) -> bool {
        self.0.join(path).exists()
    }

    /// The target of a link.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        Some(std::fs::read_link(self.0.join(path)).ok()?.to_string_lossy().into_owned())
    }

    /// The number in a file.
    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The chosen word of a file, as in `always [madvise] never`.
    pub(super) fn choice(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    /// The hard limit called `name`; `None` if it is unlimited, or unknown.
    pub(super) fn hard_limit(&self, name: &str) -> Option<u64> {
        let limits = self.text("proc/self/limits")?;
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// The bytes behind a key of `/proc/meminfo`.
    pub(super) fn meminfo(&self, key: &str) -> Option<u64> {
        let text = self.text("proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.saturating_mul(1024))
    }

    /// Whether this process has the capability of this number.
    pub(super) fn has_capability(&self, number: u32) -> bool {
        let status = self.text("proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        effective
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .is_some_and(|set| set >> number & 1 == 1)
    }

    /// The texts of a file in the control groups of this process ([`cgroup::values`]).
    pub(super) fn groups(&self, controller: &str, v2: &str, v1: &str) -> Vec<String> {
        cgroup::values(&self.0, controller, v2, v1)
    }
}
