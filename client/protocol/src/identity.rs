//! The identity that a process's certificate gives it.
//!
//! A certificate names one identity in a URI of its subject alternative names:
//!
//! | role | URI |
//! | --- | --- |
//! | node | `larder://node/NAME` |
//! | coordinator | `larder://coordinator/NAME` |
//! | admin | `larder://admin/NAME` |
//! | engine | `larder://engine/TENANT/NAME` |
//!
//! The certificate also has the DNS name `ROLE.larder`. A client checks this name when it connects: addresses change, roles do
//! not. Tenants and names have 1 to 256 characters of `A-Z a-z 0-9 . _ -`.

use std::fmt;
use std::str::FromStr;

use crate::limits::MAX_NAME_BYTES;

/// The role of a process. It decides the process's rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    /// Holds blocks and directory rows.
    Node,
    /// Keeps the table.
    Coordinator,
    /// May ask and order anything: people and their tools.
    Admin,
    /// Reads and writes the blocks of its tenant.
    Engine,
}

/// The identity of a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The role.
    pub role: Role,
    /// The tenant of an engine; `None` for all others.
    pub tenant: Option<String>,
    /// The process's name.
    pub name: String,
}

/// Why a text is no identity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no Larder identity: it looks like larder://node/NAME or larder://engine/TENANT/NAME")]
pub struct ParseIdentityError {
    /// The text.
    pub text: String,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 4] = [Self::Node, Self::Coordinator, Self::Admin, Self::Engine];

    /// The role's name in URIs and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The DNS name that certificates of this role have.
    #[must_use]
    pub fn server_name(self) -> &'static str {
        match self {
            Self::Node => "node.larder",
            Self::Coordinator => "coordinator.larder",
            Self::Admin => "admin.larder",
            Self::Engine => "engine.larder",
        }
    }
}

impl Identity {
    /// A node, coordinator or admin of this name.
    #[must_use]
    pub fn new(role: Role, name: &str) -> Self {
        Self { role, tenant: None, name: name.to_owned() }
    }

    /// An engine of a tenant.
    #[must_use]
    pub fn engine(tenant: &str, name: &str) -> Self {
        Self { role: Role::Engine, tenant: Some(tenant.to_owned()), name: name.to_owned() }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tenant {
            Some(tenant) => write!(f, "larder://{}/{tenant}/{}", self.role, self.name),
            None => write!(f, "larder://{}/{}", self.role, self.name),
        }
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, ParseIdentityError> {
        let wrong = || ParseIdentityError { text: text.to_owned() };
        let mut parts = text.strip_prefix("larder://").ok_or_else(wrong)?.split('/');
        let role = parts.next().and_then(|name| Role::ALL.into_iter().find(|role| role.name() == name));
        let role = role.ok_or_else(wrong)?;
        let mut word = || parts.next().filter(|word| is_name(word)).map(str::to_owned).ok_or_else(wrong);
        let tenant = if role == Role::Engine { Some(word()?) } else { None };
        let name = word()?;
        if parts.next().is_some() {
            return Err(wrong());
        }
        Ok(Self { role, tenant, name })
    }
}

/// Whether a text can be the name of a process or tenant: 1 to 256 characters of `A-Z a-z 0-9 . _ -`.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_written_and_read_back() {
        for identity in [
            Identity::new(Role::Node, "node-0"),
            Identity::new(Role::Coordinator, "a.b_c"),
            Identity::new(Role::Admin, "x"),
            Identity::engine("red", "vllm-3"),
        ] {
            assert_eq!(identity.to_string().parse(), Ok(identity));
        }
    }

    #[test]
    fn what_is_no_identity_is_refused() {
        for text in [
            "",
            "node/a",
            "larder://node",
            "larder://node/",
            "larder://node/a/b",
            "larder://engine/a",
            "larder://engine/a/b/c",
            "larder://king/a",
            "larder://node/a b",
            "https://node/a",
        ] {
            assert!(text.parse::<Identity>().is_err(), "{text}");
        }
    }
}
