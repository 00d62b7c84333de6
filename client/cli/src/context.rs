//! The cluster that a command asks: named by an argument, the environment or a file, or the newest development cluster.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context as _, anyhow, bail};
use larder_net::quic::CredentialFiles;
use serde::Deserialize;

use crate::address::Coordinators;
use crate::dev;
use crate::failure::Usage;

/// The argument that names a cluster.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ClusterArg {
    /// Ask this coordinator and its nodes: HOST or HOST:PORT, commas between several coordinators, or `dev` for the newest
    /// development cluster [default: LARDER_COORDINATOR, then the context file, then `dev`]
    #[arg(long, value_name = "ADDR", value_parser = Named::parse)]
    coordinator: Option<Named>,
}

/// A cluster as people name it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Named {
    Dev,
    At(Coordinators),
}

/// The cluster that was chosen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The addresses of its coordinators.
    pub(crate) coordinator: Coordinators,
    /// The admin's certificate for changes of the cluster, if one is known.
    pub(crate) admin: Option<CredentialFiles>,
}

/// The place of the context file.
#[derive(Debug)]
struct File {
    path: PathBuf,
    /// Whether `LARDER_CONTEXT` names it, so that it must be there.
    is_named: bool,
}

/// The content of the context file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContextFile {
    coordinator: Option<String>,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl ClusterArg {
    /// The cluster to ask.
    ///
    /// # Errors
    /// An address or the context file cannot be used; or nothing is named, and no development cluster runs.
    pub(crate) fn choose(&self) -> anyhow::Result<Chosen> {
        self.named(std::env::var_os("LARDER_COORDINATOR"), context_file())?.map_or_else(newest_dev, Ok)
    }

    /// The cluster that an argument, the environment or the file names; `None` stands for the newest development cluster.
    fn named(&self, environment: Option<OsString>, file: Option<File>) -> anyhow::Result<Option<Chosen>> {
        let of_environment = || {
            let text = environment.filter(|text| !text.is_empty())?;
            // No address has the replacement of a wrong byte in it.
            let text = text.to_string_lossy();
            let wrong = |error| anyhow!("`{text}`: {error}").context(Usage("LARDER_COORDINATOR".into()));
            Some(Named::parse(&text).map_err(wrong))
        };
        let named = self.coordinator.clone().map(Ok).or_else(of_environment).transpose()?;
        match (named, file) {
            (Some(Named::Dev), _) => Ok(None),
            (Some(Named::At(coordinator)), _) => Ok(Some(Chosen { coordinator, admin: None })),
            (None, Some(file)) => file.chosen(),
            (None, None) => Ok(None),
        }
    }
}

impl Named {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "dev" { Ok(Self::Dev) } else { Coordinators::parse(text).map(Self::At) }
    }
}

impl File {
    /// The cluster that the file names; `None` if there is no file at the usual place, or if the file names `dev`.
    fn chosen(self) -> anyhow::Result<Option<Chosen>> {
        let of = if self.is_named { "LARDER_CONTEXT: " } else { "" };
        let wrong = || Usage(format!("{of}cannot use the context file {}", self.path.display()));
        let text = match fs::read_to_string(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound && !self.is_named => return Ok(None),
            text => text.with_context(wrong)?,
        };
        toml::from_str(&text).map_err(anyhow::Error::from).and_then(ContextFile::chosen).with_context(wrong)
    }
}

impl ContextFile {
    fn chosen(self) -> anyhow::Result<Option<Chosen>> {
        let text = self.coordinator.context("the file names no `coordinator`")?;
        let named = Named::parse(&text).map_err(|error| anyhow!("coordinator `{text}`: {error}"))?;
        let Named::At(coordinator) = named else { return Ok(None) };
        let admin = match (self.ca, self.certificate, self.key) {
            (Some(ca), Some(certificate), Some(key)) => Some(CredentialFiles { ca, certificate, key }),
            (None, None, None) => None,
            _ => bail!("`ca`, `certificate` and `key` go together: set all three, or none"),
        };
        Ok(Some(Chosen { coordinator, admin }))
    }
}

/// `$LARDER_CONTEXT`, or `larder/context.toml` in the user's folder of configurations.
fn context_file() -> Option<File> {
    let set = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = set("LARDER_CONTEXT") {
        return Some(File { path, is_named: true });
    }
    let folder = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
    Some(File { path: folder.join("larder/context.toml"), is_named: false })
}

/// Reads the coordinators that a user names, for a command that changes nothing.
///
/// # Errors
/// The text is no address; or it is `dev`, and no development cluster runs.
pub(crate) fn coordinators(text: &str) -> Result<Coordinators, String> {
    match Named::parse(text)? {
        Named::At(coordinators) => Ok(coordinators),
        Named::Dev => newest_dev().map(|chosen| chosen.coordinator).map_err(|error| format!("{error:#}")),
    }
}

fn newest_dev() -> anyhow::Result<Chosen> {
    let coordinator = dev::newest()?.coordinator.context("the development cluster has no coordinator")?;
    Ok(Chosen { coordinator: coordinator.into(), admin: Some(dev::newest_admin()?) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;
    use std::path::Path;

    use super::*;

    fn named(argument: &str, environment: &str, file: &str) -> anyhow::Result<Option<Chosen>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("context.toml");
        if !file.is_empty() {
            fs::write(&path, file).unwrap();
        }
        let coordinator = (!argument.is_empty()).then(|| Named::parse(argument).unwrap());
        let file = File { path, is_named: false };
        ClusterArg { coordinator }.named(Some(environment.into()), Some(file))
    }

    fn coordinator(argument: &str, environment: &str, file: &str) -> Option<String> {
        Some(named(argument, environment, file).unwrap()?.coordinator.to_string())
    }

    #[test]
    fn the_argument_goes_before_the_environment_and_that_before_the_file() {
        const FILE: &str = "coordinator = 'c.example'";
        assert_eq!(coordinator("a", "b", FILE).as_deref(), Some("a:7600"));
        assert_eq!(coordinator("", "b:1", FILE).as_deref(), Some("b:1"));
        assert_eq!(coordinator("", "", FILE).as_deref(), Some("c.example:7600"));
        assert_eq!(coordinator("", "", ""), None, "the newest development cluster");
        assert_eq!(coordinator("dev", "b", FILE), None);
        assert_eq!(coordinator("", "dev", FILE), None);
    }

    #[test]
    fn a_file_brings_the_admins_certificate_and_only_to_its_own_cluster() {
        const FILE: &str = "coordinator = 'c'\nca = 'a.pem'\ncertificate = 'b.pem'\nkey = 'b.key'";
        let admin = named("", "", FILE).unwrap().unwrap().admin.unwrap();
        assert_eq!(admin.key, Path::new("b.key"));
        assert_eq!(named("a", "", FILE).unwrap().unwrap().admin, None);
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for (environment, file, part) in [
            ("a:b", "", "LARDER_COORDINATOR: `a:b`: write HOST"),
            ("", "coordinator = 'a b'", "coordinator `a b`: write HOST"),
            ("", "ca = 'x'", "the file names no `coordinator`"),
            ("", "coordinator = 'a'\nca = 'x'", "`ca`, `certificate` and `key` go together"),
            ("", "coordinators = 'a'", "unknown field `coordinators`"),
        ] {
            let error = named("", environment, file).unwrap_err();
            assert!(format!("{error:#}").contains(part) && error.is::<Usage>(), "{error:#}");
        }
    }

    #[test]
    fn a_variable_that_cannot_be_used_is_named_and_never_passed_over() {
        let missing = || Some(File { path: "/nowhere/context.toml".into(), is_named: true });
        let environment = OsString::from_vec(vec![b'a', 0xff]);
        for (environment, file, variable) in
            [(None, missing(), "LARDER_CONTEXT: "), (Some(environment), None, "LARDER_COORDINATOR: ")]
        {
            let error = ClusterArg::default().named(environment, file).unwrap_err();
            assert!(format!("{error:#}").starts_with(variable) && error.is::<Usage>(), "{error:#}");
        }
        let argument = ClusterArg { coordinator: Some(Named::parse("a").unwrap()) };
        assert!(argument.named(None, missing()).is_ok(), "the file is not needed");
    }
}
