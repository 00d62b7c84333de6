//! The coordinator's config file.
//!
//! ```toml
//! [http]
//! listen = "127.0.0.1:7600"
//!
//! [[nodes]]
//! name = "node-0"
//! http = "127.0.0.1:7601"
//! ```

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What the config file says. Unknown keys are refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where HTTP is served.
    pub http: HttpConfig,
    /// The nodes of the cluster.
    pub nodes: Vec<NodeConfig>,
}

/// Where HTTP is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
}

/// One node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    /// Its name; no two nodes share one.
    pub name: String,
    /// Where it serves HTTP.
    pub http: SocketAddr,
}

/// Why a config file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read the config file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is not TOML, or a key or value is unknown.
    #[error("the config file {} is wrong", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and what.
        source: toml::de::Error,
    },
    /// Two nodes have one name.
    #[error("two nodes are called `{name}`: give each a name of its own")]
    DuplicateNode {
        /// The name.
        name: String,
    },
}

impl Config {
    /// Reads a config file.
    ///
    /// # Errors
    /// [`ConfigError`]: the file cannot be read, or says something impossible.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let config: Self =
            toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        for (i, node) in self.nodes.iter().enumerate() {
            if self.nodes[..i].iter().any(|other| other.name == node.name) {
                return Err(ConfigError::DuplicateNode { name: node.name.clone() });
            }
        }
        Ok(())
    }
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self { listen: (Ipv4Addr::LOCALHOST, DEFAULT_HTTP_PORT).into() }
    }
}

const DEFAULT_HTTP_PORT: u16 = 7600;

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn read(text: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coordinator.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(&path)
    }

    #[test]
    fn an_empty_file_means_the_defaults() {
        assert_eq!(read("").unwrap(), Config::default());
    }

    #[test]
    fn the_file_of_the_documentation_is_read_and_written_back() {
        let text = "[http]\nlisten = \"127.0.0.1:7600\"\n\n[[nodes]]\nname = \"node-0\"\nhttp = \"127.0.0.1:7601\"\n";
        assert_eq!(toml::to_string(&read(text).unwrap()).unwrap(), text);
    }

    #[test]
    fn unknown_keys_are_named() {
        let error = read("[http]\nlissten = \"127.0.0.1:1\"").unwrap_err();
        assert!(error.source().unwrap().to_string().contains("lissten"), "{error:?}");
    }

    #[test]
    fn two_nodes_of_one_name_are_refused() {
        let node = "[[nodes]]\nname = \"a\"\nhttp = \"127.0.0.1:1\"\n";
        assert!(matches!(read(&node.repeat(2)), Err(ConfigError::DuplicateNode { name }) if name == "a"));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Config::read(Path::new("/nowhere/coordinator.toml")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the config file /nowhere/coordinator.toml");
    }
}
