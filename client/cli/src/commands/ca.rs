//! `larder ca`: a small certificate authority for a cluster.

mod folders;
mod rotate;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use larder_net::quic::ca::{Authority, Issued, Validity};
use larder_protocol::identity::{Identity, Role};
use serde_json::json;

use crate::failure::Usage;
use crate::output;

/// Make the certificates of a cluster's processes
///
/// Nodes, coordinators, engines and admins talk over QUIC with mutual TLS. Each of them shows a certificate with its role and
/// name, and trusts the certificates of one authority. Certificates of another authority work too, provided that their subject
/// alternative names are the URI larder://ROLE/NAME (for an engine larder://engine/TENANT/NAME) and the DNS name ROLE.larder.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder ca init --dir ca                              Once a cluster: ca/ca.pem and ca/ca.key
  larder ca issue node node-0 --dir ca                 For each node: ca/node-0.pem and ca/node-0.key
  larder ca issue coordinator main --dir ca --out /etc/larder
  larder ca issue engine vllm-0 --tenant red --dir ca --days 30
  larder ca rotate --dir ca                            How far the change to a new authority is

Every process gets ca.pem, its own certificate and its own key. Keep ca.key to yourself: its owner can act as anybody.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Init(Init),
    Issue(Issue),
    Rotate(rotate::Rotate),
}

/// Make an authority: its certificate ca.pem and its key ca.key
///
/// The command replaces no files: with another key, every certificate would have to be issued again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder ca init --dir ca               ca/ca.pem for every process, ca/ca.key for you alone
  larder ca init --dir ca --days 365    For a year")]
struct Init {
    /// Folder for the files; a missing folder is made, for its owner alone
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,

    /// Days until the certificate expires
    #[arg(long, value_name = "N", default_value_t = 3_650, value_parser = days())]
    days: u32,

    /// Print JSON: one object with `certificate` and `key`
    #[arg(long)]
    json: bool,
}

/// Issue a certificate and its key: NAME.pem and NAME.key
///
/// The command replaces no files. To renew a certificate before it expires, issue it into another folder, and install both files
/// over the old ones. The new key belongs to you alone. For a process of the group `larder`, install it by
/// `install -m 0640 -g larder NEW/NAME.key /etc/larder/node.key`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder ca issue node node-0 --dir ca                            ca/node-0.pem and ca/node-0.key
  larder ca issue coordinator main --dir ca --out /etc/larder     Into another folder
  larder ca issue engine vllm-0 --tenant red --dir ca --days 30   An engine of the tenant `red`")]
struct Issue {
    /// Role of the process
    #[arg(value_parser = roles())]
    role: Role,

    /// Name of the process: for a node, the name in its configuration
    name: String,

    /// Tenant whose blocks an engine reads and writes; for engines only
    #[arg(long, value_name = "TENANT", required_if_eq("role", "engine"))]
    tenant: Option<String>,

    /// Days until the certificate expires
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = days())]
    days: u32,

    /// Folder of the authority's files
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,

    /// Folder for the new files; a missing folder is made, for its owner alone [default: the authority's folder]
    ///
    /// `ca-folders.txt` in the authority's folder lists other folders: `larder ca rotate` reissues the certificates there
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Print JSON: one object with `certificate`, `key`, `identity` and `days`
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Init(init) => init.run()?,
        Command::Issue(issue) => issue.run()?,
        Command::Rotate(rotate) => rotate.run()?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Init {
    fn run(&self) -> anyhow::Result<()> {
        let (_, files) = Authority::create(Validity::days(self.days))?;
        let (certificate, key) = write(&self.dir, AUTHORITY, &files)?;
        if self.json {
            return Ok(output::print_json(&json!({ "certificate": certificate, "key": key }))?);
        }
        Ok(output::print(&format!("{certificate} goes to every process; keep {key} secret."))?)
    }
}

impl Issue {
    fn run(&self) -> anyhow::Result<()> {
        let identity = self.identity()?;
        let issued = self.authority()?.issue(&identity, Validity::days(self.days))?;
        let out = self.out.as_ref().unwrap_or(&self.dir);
        let (certificate, key) = write(out, &self.name, &issued)?;
        if let Err(error) = folders::remember(&self.dir, out) {
            let (dir, out) = (self.dir.display(), out.display());
            output::note(format_args!(
                "note: {dir} cannot be written ({error}): when you replace the authority, name {out} with --certificates"
            ));
        }
        if self.json {
            let identity = identity.to_string();
            let days = self.days;
            let made = json!({ "certificate": certificate, "key": key, "identity": identity, "days": days });
            return Ok(output::print_json(&made)?);
        }
        let lasts = output::counted(self.days as usize, "day");
        Ok(output::print(&format!("{certificate} and {key} make a process {identity} for {lasts}."))?)
    }

    fn identity(&self) -> anyhow::Result<Identity> {
        if self.tenant.is_some() && self.role != Role::Engine {
            return Err(
                Usage(format!("--tenant: a {} has no tenant; only engines have one", self.role)).into()
            );
        }
        if [AUTHORITY, rotate::NEXT].contains(&&*self.name) {
            return Err(Usage(format!("the name {} is reserved for the authority's files", self.name)).into());
        }
        let identity = Identity { role: self.role, tenant: self.tenant.clone(), name: self.name.clone() };
        let read_back = identity.to_string().parse::<Identity>();
        let identity = read_back.context(Usage(
            "a name and a tenant have 1 to 256 characters out of A-Z a-z 0-9 . _ -".to_owned(),
        ))?;
        if self.name.len() > MAX_FILE_NAME {
            let text = format!(
                "the name has {} characters, and files are named after it: {MAX_FILE_NAME} at most",
                self.name.len()
            );
            return Err(Usage(text).into());
        }
        if self.name.starts_with(['.', '-']) {
            let text = format!("the name {} cannot name files: begin it with a letter or a digit", self.name);
            return Err(Usage(text).into());
        }
        Ok(identity)
    }

    fn authority(&self) -> anyhow::Result<Authority> {
        let read = |path: PathBuf| {
            let hint = || Usage(format!("cannot read {}: `larder ca init` makes it", path.display()));
            fs::read_to_string(&path).with_context(hint)
        };
        let [certificate, key] = paths(&self.dir, AUTHORITY);
        let (certificate, key) = (read(certificate)?, read(key)?);
        let wrong = || Usage(format!("cannot use the authority in {}", self.dir.display()));
        Authority::load(&certificate, &key).with_context(wrong)
    }
}

/// Writes NAME.pem and NAME.key; neither may exist. Returns their paths for people.
fn write(dir: &Path, name: &str, files: &Issued) -> anyhow::Result<(String, String)> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(|| Usage(format!("cannot make the directory {}", dir.display())))?;
    let [certificate, key] = paths(dir, name);
    let refused = |path: &Path, error: io::Error| {
        let text = match error.kind() {
            ErrorKind::AlreadyExists => {
                format!(
                    "{} exists already, and is not replaced: remove it first, or choose another --dir",
                    path.display()
                )
            }
            _ => format!("cannot write {}", path.display()),
        };
        anyhow::Error::new(error).context(Usage(text))
    };
    create(&key, 0o600, &files.key_pem).map_err(|error| refused(&key, error))?;
    if let Err(error) = create(&certificate, 0o644, &files.certificate_pem) {
        // A key without a certificate has no use, and would block the next try.
        let _ = fs::remove_file(&key);
        return Err(refused(&certificate, error));
    }
    Ok((certificate.display().to_string(), key.display().to_string()))
}

/// Creates a file, which must not exist. If the text cannot be written, no file stays.
fn create(path: &Path, mode: u32, text: &str) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(text.as_bytes()).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })?;
    Ok(file)
}

fn paths(dir: &Path, name: &str) -> [PathBuf; 2] {
    ["pem", "key"].map(|ending| dir.join(format!("{name}.{ending}")))
}

fn roles() -> impl TypedValueParser<Value = Role> {
    let names = Role::ALL.map(|role| PossibleValue::new(role.name()).help(duty(role)));
    PossibleValuesParser::new(names)
        .try_map(|name| Role::ALL.into_iter().find(|role| role.name() == name).ok_or("no role"))
}

fn duty(role: Role) -> &'static str {
    match role {
        Role::Node => "Holds blocks and directory rows",
        Role::Coordinator => "Keeps the members and the partition table",
        Role::Admin => "Asks and orders anything: people and their tools",
        Role::Engine => "Reads and writes the blocks of its tenant",
    }
}

fn days() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=MAX_DAYS)
}

/// Name of the authority's own files.
const AUTHORITY: &str = "ca";

/// Characters of a name that leave room for the endings of its files: `.key.new.unfinished` is the longest.
const MAX_FILE_NAME: usize = 200;

/// A hundred years: far below the limit of dates.
const MAX_DAYS: i64 = 36_500;
