//! `larder config`: the values that a configuration file gives.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::ValueEnum;
use larder_coordinator::{Config as CoordinatorConfig, check_build, check_files};
use larder_net::quic::{CredentialFiles, Credentials};
use larder_net::{config_file, log_paths};
use larder_node::host::HostFacts;
use larder_node::limits::Limits;
use larder_node::session::check_socket_path;
use larder_node::{ClusterError, Config};
use larder_protocol::identity::Role as IdentityRole;
use serde_json::json;

use crate::config_report::ConfigReport;
use crate::failure::{self, Usage};
use crate::logging::check_filter;
use crate::output;

/// Check configuration files
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder config check node.toml            The values on this machine, or the wrong lines
  larder node --print-config > node.toml   Every key with its default")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Check(Check),
}

/// Show the values of a node's or coordinator's configuration on this machine
///
/// The command starts nothing. It warns if this machine cannot use the certificates and other files that the configuration
/// names; `larder doctor --config FILE` checks more of a node's machine. The command refuses a tenant's socket or a log if another
/// kind of file or another log has the path, and an election backend or tokenizers that this program was built without.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder config check node.toml
  larder config check coordinator.toml --json      One object with `file`, `role`, `values` and `warnings`
  larder config check /etc/larder/x.toml --role node

Exit status: 2 if the file cannot be used.")]
struct Check {
    /// The configuration file
    file: PathBuf,

    /// Server of the configuration [default: coordinator if the file has [peer], [state], [membership] or [election], else node]
    #[arg(long, value_name = "ROLE")]
    role: Option<Role>,

    /// Print JSON: one object with `file`, `role`, `values` and `warnings`
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// A node
    Node,
    /// A coordinator
    Coordinator,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Command::Check(check) = &args.command;
    check.run()?;
    Ok(ExitCode::SUCCESS)
}

impl Check {
    fn run(&self) -> anyhow::Result<()> {
        let wrong = || Usage("the configuration cannot be used".into());
        let role = match self.role {
            Some(role) => role,
            None => role_of(&self.file).with_context(wrong)?,
        };
        let report = match role {
            Role::Node => {
                let mut config = Config::load(&self.file).with_context(wrong)?;
                config.tracing = config.tracing.or_from_environment();
                let limits = config.resolve(&HostFacts::read(Path::new("/"))?).with_context(wrong)?;
                config.log.as_deref().map_or(Ok(()), check_filter).with_context(wrong)?;
                check_paths(&limits, Some(&self.file)).with_context(wrong)?;
                let mut report = ConfigReport::of_node(&limits);
                let files = [&config.audit, &config.record];
                report.warnings.extend(files.into_iter().flatten().filter_map(|file| no_folder(&file.path)));
                let name = &limits.name;
                report
                    .warnings
                    .extend(limits.cluster.and_then(|cluster| unusable(&cluster.credentials, name)));
                let tiers = limits.actors.iter().filter_map(|actor| actor.disk.as_ref());
                report.warnings.extend(tiers.filter_map(|disk| no_tier(&disk.options.folder)).next());
                report
            }
            Role::Coordinator => {
                let mut config = CoordinatorConfig::read(&self.file).with_context(wrong)?;
                config.tracing = config.tracing.or_from_environment();
                check_build(&config).with_context(wrong)?;
                log_paths::check(&[("audit", config.audit.as_ref())], Some(&self.file))
                    .with_context(wrong)?;
                let mut report = ConfigReport::of_coordinator(&config);
                report.warnings.extend(config.audit.as_ref().and_then(|audit| no_folder(&audit.path)));
                report.warnings.extend(no_folder(&config.state.path));
                report.warnings.extend(check_files(&config).into_iter().map(would_not_start));
                report
            }
        };
        if self.json {
            let role = if role == Role::Node { "node" } else { "coordinator" };
            let (values, warnings) = (report.json(), &report.warnings);
            let report = json!({ "file": self.file.to_string_lossy(), "role": role, "values": values, "warnings": warnings });
            return Ok(output::print_json(&report)?);
        }
        let warnings = report.warnings.iter().map(|warning| format!("\nwarning: {warning}"));
        Ok(output::print(&(report.table() + &warnings.collect::<String>()))?)
    }
}

/// Reads a node's configuration file. The error of a coordinator's file says that it is one.
pub(crate) fn load_node(file: &Path) -> anyhow::Result<Config> {
    Config::load(file).map_err(|error| match role_of(file) {
        Ok(Role::Coordinator) => anyhow::Error::from(error).context(format!(
            "{0} is a coordinator's configuration, and a node's is needed (`larder config check {0}` checks it)",
            file.display()
        )),
        _ => error.into(),
    })
}

/// Checks that no file of another kind has the path of a tenant's socket or a log, and that each log has its own. Opens no file.
pub(crate) fn check_paths(limits: &Limits, file: Option<&Path>) -> anyhow::Result<()> {
    limits.tenants.iter().try_for_each(|tenant| check_socket_path(&tenant.socket))?;
    Ok(log_paths::check(&[("audit", limits.audit.as_ref()), ("record", limits.record.as_ref())], file)?)
}

/// A warning if these certificates cannot be used on this machine by the node `node`.
fn unusable(files: &CredentialFiles, node: &str) -> Option<String> {
    match Credentials::load(files) {
        Ok(credentials) => {
            let found = credentials.identity().clone();
            let is_its = found.role == IdentityRole::Node && found.name == node;
            (!is_its).then(|| would_not_start(ClusterError::SomebodyElse { found, name: node.to_owned() }))
        }
        Err(error) => Some(would_not_start(error)),
    }
}

/// A warning of a fault of this machine. This is no error: the file may be meant for another machine.
fn would_not_start(fault: impl Into<anyhow::Error>) -> String {
    format!("on this machine the server would not start: {}", failure::text(&fault.into()))
}

/// A warning if the folder of a disk tier cannot be made on this machine. The node makes missing folders.
fn no_tier(folder: &Path) -> Option<String> {
    let there = folder.ancestors().find(|there| there.exists()).filter(|there| !there.is_dir())?;
    Some(format!(
        "{} is no folder, and the node would serve without its disk tier in {}",
        there.display(),
        folder.display()
    ))
}

/// A warning if this machine lacks the folder of a file that the server writes.
fn no_folder(file: &Path) -> Option<String> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    (!folder.is_dir()).then(|| {
        format!(
            "this machine has no folder {}, and the server could not write {}",
            folder.display(),
            file.display()
        )
    })
}

/// Guesses the server from the file's keys. A file that is no TOML counts as a node's, so that the node's reader names the wrong
/// line.
fn role_of(file: &Path) -> anyhow::Result<Role> {
    let text = config_file::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let table: toml::Table = text.parse().unwrap_or_default();
    let is_coordinator =
        ["peer", "state", "membership", "election"].iter().any(|key| table.contains_key(*key));
    Ok(if is_coordinator { Role::Coordinator } else { Role::Node })
}

/// The deployed configuration file of a node: every key with its default.
pub(crate) const NODE: &str = include_str!("../../../../deploy/config/node.toml");

/// The deployed configuration file of a coordinator: every key with its default.
pub(crate) const COORDINATOR: &str = include_str!("../../../../deploy/config/coordinator.toml");
