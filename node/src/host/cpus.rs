//! Sets of CPUs, in the kernel's notation.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// CPUs by number. They are written as the kernel does: `0-3,8-11`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<u32>);

/// A text that is no list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no list of CPUs; it looks like `0-3,8-11`")]
pub struct ParseCpusError(String);

impl CpuSet {
    /// The CPUs, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// Whether the set contains `cpu`.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The CPUs that are in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = ParseCpusError;

    fn from_str(text: &str) -> Result<Self, ParseCpusError> {
        let mut cpus = BTreeSet::new();
        for range in text.trim().split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            match (first.trim().parse::<u32>(), last.trim().parse()) {
                (Ok(first), Ok(last)) if first <= last && last < MOST_CPUS => cpus.extend(first..=last),
                _ => return Err(ParseCpusError(text.trim().to_owned())),
            }
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

/// More CPUs than any machine has. The limit keeps a strange file from filling the memory.
const MOST_CPUS: u32 = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_and_written_as_the_kernel_does() {
        for list in ["", "0", "0-3", "0-3,8-11", "1,3,5-6"] {
            let cpus: CpuSet = list.parse().unwrap();
            assert_eq!(cpus.to_string(), list);
        }
        assert_eq!("0-3,8-11\n".parse::<CpuSet>().unwrap().len(), 8);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["a", "3-1", "1-", "-", "0-4000000000"] {
            assert_eq!(text.parse::<CpuSet>(), Err(ParseCpusError(text.into())));
        }
    }
}
