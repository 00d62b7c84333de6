//! Planted faults: their list, and the change of the sources by each.
//!
//! Each fault stands beside the right text, behind the word `PLANTED`. `PLANTED` is true in a process whose environment variable
//! [`CHOSEN`] names the fault. All faults are planted into one copy of the sources, which is built once; each process has at most
//! one fault.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// A change of the sources that must not go unnoticed.
#[derive(Debug, Clone)]
pub struct Planted {
    /// The fault's name.
    pub name: String,
    /// The effect of the fault.
    pub what: String,
    /// The file that it changes.
    pub file: PathBuf,
    old: String,
    new: String,
}

/// The environment variable that names the fault of a process.
pub const CHOSEN: &str = "LARDER_PLANTED";

/// All planted faults, by name.
///
/// # Errors
/// Fails if a fault cannot be read.
pub fn all(sources: &Path) -> Result<Vec<Planted>> {
    let folder = sources.join("tests/simulation/planted");
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        all.push(parse(name, &text).with_context(|| format!("{} is no planted fault", path.display()))?);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Reads a planted fault: its effect, its file, the old text and the new text.
fn parse(name: String, text: &str) -> Option<Planted> {
    let (what, rest) = text.split_once("\nfile: ")?;
    let (file, rest) = rest.split_once("\n<<<<\n")?;
    let (old, rest) = rest.split_once("\n====\n")?;
    let new = rest.strip_suffix(">>>>\n")?;
    let (what, file) = (what.to_owned(), file.into());
    Some(Planted { name, what, file, old: old.to_owned(), new: new.trim_end_matches('\n').to_owned() })
}

impl Planted {
    /// The text of the fault's file with this fault in it, besides the faults that it has already.
    ///
    /// # Errors
    /// Fails if the old text is not there exactly once, or the new text does not ask whether the fault is chosen.
    pub fn apply(&self, right: &str) -> Result<String> {
        let count = right.matches(&self.old).count();
        ensure!(
            count == 1,
            "{}: the old text occurs {count} times in {}, not once",
            self.name,
            self.file.display()
        );
        ensure!(
            self.new.contains("PLANTED"),
            "{}: the new text lacks PLANTED, so the fault is always on",
            self.name
        );
        let is_chosen = format!(
            "{{ static IS: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| \
             std::env::var(\"{CHOSEN}\").is_ok_and(|name| name == \"{}\")); *IS }}",
            self.name
        );
        Ok(right.replace(&self.old, &self.new.replace("PLANTED", &is_chosen)))
    }
}
