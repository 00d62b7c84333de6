//! `larder ca rotate`: replaces the authority while the cluster goes on.
//!
//! The files show the stage, so a step that was interrupted can be repeated:
//!
//! | stage | `ca.pem` | `ca.key` | `ca-next.pem`, `ca-next.key` |
//! | --- | --- | --- | --- |
//! | settled | the authority | its key | – |
//! | started | the old, then the new | the old one's | the new one's |
//! | reissued | the new, then the old | the new one's | – |
//!
//! Two renames replace a certificate and its key. If a run stops between them, NAME.pem.new is left without NAME.key.new, and the
//! next run renames it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt as _, fchown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use larder_net::quic::ca::{Authority, Issued, Validity};
use larder_net::quic::{CredentialFiles, Credentials, RENEWAL_CHECK, inspect};
use serde::Serialize;

use super::{AUTHORITY, create, days, folders, paths};
use crate::failure::Usage;
use crate::output;

/// Replace the authority while the cluster goes on, step by step
///
/// Every step may be repeated. Without a step, the command shows the state and the next step. After each step, copy the files to
/// the processes. Within half a minute, processes use them for new connections, without a restart. On Kubernetes, pods take their
/// files when they start: update the Secret and restart the pods after each step (the book's page "Security" has the commands).
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder ca rotate start --dir ca     1. A new authority; ca.pem trusts both. Copy ca.pem to every process, wait
  larder ca rotate reissue --dir ca   2. New certificates from it. Copy NAME.pem and NAME.key to their process, wait
  larder ca rotate finish --dir ca    3. ca.pem trusts the new one alone. Copy ca.pem to every process
  larder ca rotate --dir ca           Show the state
  larder ca rotate reissue --dir ca --certificates out --days 90")]
pub(super) struct Rotate {
    /// The step to take; without one, the command shows the state
    step: Option<RotationStep>,

    /// Folder of the authority's files
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,

    /// Folder of processes' certificates with their keys, with its subfolders; may be given several times [default: the authority's
    /// folder, and the folders of `larder ca issue --out`]
    #[arg(long, value_name = "DIR")]
    certificates: Vec<PathBuf>,

    /// Days until new files expire [default: 3650 for the authority, 365 for certificates]
    #[arg(long, value_name = "N", value_parser = days())]
    days: Option<u32>,

    /// Print JSON: one object with `stage`, `done` and `next`
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RotationStep {
    /// Makes the new authority; ca.pem then trusts both
    Start,
    /// Issues every certificate again, by the new authority
    Reissue,
    /// Makes ca.pem trust the new authority alone
    Finish,
}

/// The progress of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Stage {
    Settled,
    Started,
    Reissued,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    stage: Stage,
    done: Vec<String>,
    next: String,
}

/// The authority's files.
struct Files<'a> {
    dir: &'a Path,
    /// The authorities in `ca.pem`, first to last.
    trusted: Vec<String>,
}

impl Rotate {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let mut files = Files::read(&self.dir)?;
        let mut done = Vec::new();
        match self.step {
            None => {}
            Some(RotationStep::Start) => files.start(self.days.unwrap_or(AUTHORITY_DAYS), &mut done)?,
            Some(RotationStep::Reissue) => {
                files.reissue(&self.folders()?, self.days.unwrap_or(CERTIFICATE_DAYS), &mut done)?;
            }
            Some(RotationStep::Finish) => files.finish(&self.folders()?, &mut done)?,
        }
        let stage = files.stage();
        let report = Report { stage, done, next: self.next(stage) };
        if self.json {
            return Ok(output::print_json(&report)?);
        }
        let mut text = report.done.join("\n");
        if report.done.is_empty() && self.step.is_some() {
            text += "This step was done before: nothing has changed.";
        }
        Ok(output::print(format!("{text}\n{}", report.next).trim_start())?)
    }

    fn folders(&self) -> anyhow::Result<Vec<PathBuf>> {
        if self.certificates.is_empty() { folders::all(&self.dir) } else { Ok(self.certificates.clone()) }
    }

    fn next(&self, stage: Stage) -> String {
        let (dir, wait) = (self.dir.display(), RENEWAL_CHECK.as_secs() + 5);
        match stage {
            Stage::Settled => format!(
                "Next: copy ca.pem to every process, if they do not have it. `larder ca rotate start --dir {dir}` begins a change."
            ),
            Stage::Started => format!(
                "Next: copy ca.pem to every process, wait {wait} s, then `larder ca rotate reissue --dir {dir}`."
            ),
            Stage::Reissued => format!(
                "Next: copy each NAME.pem and NAME.key to the process NAME, wait {wait} s, then `larder ca rotate \
                 finish --dir {dir}`."
            ),
        }
    }
}

impl<'a> Files<'a> {
    fn read(dir: &'a Path) -> anyhow::Result<Self> {
        let path = &paths(dir, AUTHORITY)[0];
        let hint = || Usage(format!("cannot read {}: `larder ca init` makes it", path.display()));
        let trusted = certificates(&fs::read_to_string(path).with_context(hint)?);
        if trusted.is_empty() {
            return Err(Usage(format!("{} has no certificate", path.display())).into());
        }
        Ok(Self { dir, trusted })
    }

    fn stage(&self) -> Stage {
        let [next, next_key] = paths(self.dir, NEXT);
        // A start that was interrupted before `ca.pem` trusted the new authority begins again.
        let new = fs::read_to_string(next).map(|pem| certificates(&pem)).unwrap_or_default();
        let is_trusted = new.iter().any(|new| self.trusted.contains(new));
        match (is_trusted && next_key.exists(), self.trusted.len()) {
            (true, _) => Stage::Started,
            (false, 1) => Stage::Settled,
            (false, _) => Stage::Reissued,
        }
    }

    fn start(&mut self, days: u32, done: &mut Vec<String>) -> anyhow::Result<()> {
        match self.stage() {
            Stage::Reissued => {
                let text =
                    "a change is in progress: end it with `larder ca rotate finish` before you start another";
                Err(Usage(text.into()).into())
            }
            Stage::Settled => {
                let (_, made) = Authority::create(Validity::days(days))?;
                let ([next, next_key], [ca, key]) = (paths(self.dir, NEXT), paths(self.dir, AUTHORITY));
                replace(&next_key, &key, 0o600, &made.key_pem)?;
                replace(&next, &ca, 0o644, &made.certificate_pem)?;
                done.push(format!("{} is the new authority.", next.display()));
                self.trust([self.trusted.clone(), certificates(&made.certificate_pem)].concat(), done)
            }
            Stage::Started => Ok(()),
        }
    }

    fn reissue(&mut self, folders: &[PathBuf], days: u32, done: &mut Vec<String>) -> anyhow::Result<()> {
        let [next, next_key] = paths(self.dir, NEXT);
        let [_, key] = paths(self.dir, AUTHORITY);
        let stage = self.stage();
        if stage == Stage::Settled {
            return Err(Usage("no change is in progress: `larder ca rotate start` begins one".into()).into());
        }
        let new = self.new_authority()?;
        let signs = if stage == Stage::Started { &next_key } else { &key };
        let authority = Authority::load(&new, &fs::read_to_string(signs)?)
            .with_context(|| Usage(format!("cannot use the authority in {}", self.dir.display())))?;
        for files in self.process_files(folders)? {
            if !is_issued_by(&files, &new)? {
                done.push(reissue(&authority, &files, days)?);
            }
        }
        if stage == Stage::Started {
            let old = self.trusted.iter().filter(|trusted| **trusted != new).cloned();
            self.trust([new.clone()].into_iter().chain(old).collect(), done)?;
            rename(&next_key, &key).with_context(|| format!("cannot replace {}", key.display()))?;
            fs::remove_file(&next).with_context(|| format!("cannot remove {}", next.display()))?;
            done.push(format!("{} is the new authority's: the old one issues nothing more.", key.display()));
        }
        Ok(())
    }

    fn finish(&mut self, folders: &[PathBuf], done: &mut Vec<String>) -> anyhow::Result<()> {
        match self.stage() {
            Stage::Settled => return Ok(()),
            Stage::Started => {
                let text =
                    "certificates are still from the old authority: run `larder ca rotate reissue` first";
                return Err(Usage(text.into()).into());
            }
            Stage::Reissued => {}
        }
        let new = self.new_authority()?;
        for files in self.process_files(folders)? {
            if !is_issued_by(&files, &new)? {
                let path = files.certificate.display();
                let text =
                    format!("{path} is still from the old authority: `larder ca rotate reissue` replaces it");
                return Err(Usage(text).into());
            }
        }
        self.trust(vec![new], done)
    }

    /// The certificate of the authority that takes over.
    fn new_authority(&self) -> anyhow::Result<String> {
        let next = &paths(self.dir, NEXT)[0];
        let found = match self.stage() {
            Stage::Started => certificates(&fs::read_to_string(next)?).into_iter().next(),
            _ => self.trusted.first().cloned(),
        };
        found.with_context(|| Usage(format!("{} has no certificate", next.display())))
    }

    /// The certificates with keys in these folders and their subfolders, except the authority's. First repairs the files that an
    /// interrupted run left.
    ///
    /// # Errors
    /// There is none, or one in a subfolder is not of this authority: nobody named it.
    fn process_files(&self, folders: &[PathBuf]) -> anyhow::Result<Vec<CredentialFiles>> {
        let mut found = find(folders)?;
        if found.is_empty() {
            let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
            let text = format!(
                "no certificate of a process stands in {}: name the folders of NAME.pem and NAME.key with --certificates",
                folders.join(", ")
            );
            return Err(Usage(text).into());
        }
        found.sort_by(|a, b| a.certificate.cmp(&b.certificate));
        for files in &found {
            let [new, new_key] = [&files.certificate, &files.key].map(|path| beside(path));
            if new.exists() && !new_key.exists() {
                rename(&new, &files.certificate)?;
            }
            let is_named = files.key.parent().is_some_and(|of| folders.iter().any(|folder| folder == of));
            if !is_named && !is_issued_by(files, &self.trusted.concat())? {
                let text = format!(
                    "{} has expired, or is of another authority: name the folders of this authority's certificates with \
                     --certificates",
                    files.certificate.display()
                );
                return Err(Usage(text).into());
            }
        }
        Ok(found)
    }

    fn trust(&mut self, trusted: Vec<String>, done: &mut Vec<String>) -> anyhow::Result<()> {
        let path = &paths(self.dir, AUTHORITY)[0];
        replace(path, path, 0o644, &trusted.concat())?;
        let count = output::counted(trusted.len(), "authority").replace("authoritys", "authorities");
        done.push(format!("{} trusts {count}.", path.display()));
        self.trusted = trusted;
        Ok(())
    }
}

/// The certificates in a text of PEM.
fn certificates(pem: &str) -> Vec<String> {
    let (begin, end) = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----");
    let bodies = pem.split(begin).skip(1).filter_map(|rest| Some(rest.split_once(end)?.0));
    bodies.map(|body| format!("{begin}{}{end}\n", body.replace('\r', ""))).collect()
}

/// The certificates with keys in these folders and their subfolders. A subfolder with an authority of its own is another cluster's.
fn find(folders: &[PathBuf]) -> anyhow::Result<Vec<CredentialFiles>> {
    let (mut found, mut unread) = (Vec::new(), folders.to_vec());
    while let Some(folder) = unread.pop() {
        let wrong = || Usage(format!("cannot read {}", folder.display()));
        for entry in fs::read_dir(&folder).with_context(wrong)? {
            let entry = entry.with_context(wrong)?;
            let key = entry.path();
            if entry.file_type().with_context(wrong)?.is_dir() {
                if !paths(&key, AUTHORITY)[1].exists() {
                    unread.push(key);
                }
                continue;
            }
            let Some(name) = key.file_stem().map(|name| name.to_string_lossy().into_owned()) else {
                continue;
            };
            let is_key = key.extension().is_some_and(|extension| extension == "key");
            let [certificate, _] = paths(&folder, &name);
            if is_key && name != AUTHORITY && name != NEXT && certificate.exists() {
                found.push(CredentialFiles { ca: PathBuf::new(), certificate, key });
            }
        }
    }
    Ok(found)
}

/// Whether a process that trusts only this authority, or these, would accept the certificate now.
fn is_issued_by(files: &CredentialFiles, authority: &str) -> anyhow::Result<bool> {
    let mut ca = tempfile::NamedTempFile::new()?;
    io::Write::write_all(&mut ca, authority.as_bytes())?;
    Ok(inspect(&CredentialFiles { ca: ca.path().to_owned(), ..files.clone() }, SystemTime::now()).is_ok())
}

/// Issues a new certificate and key for the owner of the old ones.
fn reissue(authority: &Authority, files: &CredentialFiles, days: u32) -> anyhow::Result<String> {
    let path = files.certificate.display();
    let wrong = || Usage(format!("cannot use {path}"));
    let own = fs::read(&files.certificate).with_context(wrong)?;
    let key = fs::read(&files.key).with_context(wrong)?;
    let identity = Credentials::from_pem(&own, &own, &key).with_context(wrong)?.identity().clone();
    let Issued { certificate_pem, key_pem } = authority.issue(&identity, Validity::days(days))?;
    let [new, new_key] = [&files.certificate, &files.key].map(|path| beside(path));
    replace(&new_key, &files.key, 0o600, &key_pem)?;
    replace(&new, &files.certificate, 0o644, &certificate_pem)?;
    rename(&new_key, &files.key)?;
    rename(&new, &files.certificate)?;
    Ok(format!("{path} makes a process {identity}, issued by the new authority."))
}

/// The path of a file's next version.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Writes a file that appears whole or not at all. It gets owner and mode of the file `like`; without this file, `mode`.
fn replace(path: &Path, like: &Path, mode: u32, text: &str) -> anyhow::Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            bail!("cannot replace {path:?}: {error}")
        }
        _ => {}
    }
    let write = || {
        let file = create(&unfinished, mode, text)?;
        if let Ok(like) = fs::metadata(like) {
            let hint = |error| io::Error::other(format!("{error}: only its owner or root can replace it"));
            fchown(&file, Some(like.uid()), Some(like.gid())).map_err(hint)?;
            file.set_permissions(like.permissions())?;
        }
        file.sync_all()?;
        rename(&unfinished, path)
    };
    write().with_context(|| Usage(format!("cannot write {}", path.display())))
}

/// Renames a file, also if the machine fails right after.
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    File::open(std::path::absolute(to)?.parent().unwrap_or(to))?.sync_all()
}

/// Name of the new authority's files, until it has issued everything.
pub(super) const NEXT: &str = "ca-next";

const AUTHORITY_DAYS: u32 = 3_650;
const CERTIFICATE_DAYS: u32 = 365;
