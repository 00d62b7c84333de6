//! The policies that can be planned with: the store's policies, and two that no store can have.

use std::fmt;
use std::str::FromStr;

use larder_core::store::policy::PolicyName;

/// A policy in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlanPolicy {
    /// A policy of the store.
    Store(PolicyName),
    /// The best possible choice, with knowledge of the future.
    Opt,
    /// Nothing is ever evicted.
    Infinite,
}

impl PlanPolicy {
    /// Every policy there is, the bounds last.
    pub fn all() -> impl Iterator<Item = Self> {
        PolicyName::ALL.into_iter().map(Self::Store).chain([Self::Opt, Self::Infinite])
    }

    /// The store's policy; `None` for the bounds.
    pub fn of_store(self) -> Option<PolicyName> {
        if let Self::Store(name) = self { Some(name) } else { None }
    }

    /// The policy's name in commands and results.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Store(name) => name.as_str(),
            Self::Opt => "opt",
            Self::Infinite => "infinite",
        }
    }
}

impl fmt::Display for PlanPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PlanPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::all().find(|policy| policy.as_str() == name).ok_or_else(|| UnknownPolicy { name: name.into() })
    }
}

/// A name that is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy `{name}`; there are: {}", names())]
pub struct UnknownPolicy {
    name: String,
}

fn names() -> String {
    PlanPolicy::all().map(PlanPolicy::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_found_by_name_and_an_unknown_one_lists_them_with_the_bounds() {
        assert!(PlanPolicy::all().all(|policy| policy.as_str().parse() == Ok(policy)));
        let error = "lruu".parse::<PlanPolicy>().unwrap_err().to_string();
        assert!(error.starts_with("there is no policy `lruu`; there are: "), "{error}");
        assert!(error.contains("lru, ") && error.ends_with("opt, infinite"), "{error}");
    }
}
