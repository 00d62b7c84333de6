//! `larder man`: the manual pages.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;

use crate::failure::Usage;
use crate::output;

/// Write a manual page for each command
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder man /usr/local/share/man/man1     Then `man larder`, `man larder-replay`, `man larder-ca-issue`
  larder man . && man ./larder.1")]
pub(crate) struct Args {
    /// Folder for the pages; a missing folder is made, older pages are replaced
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Print JSON: one object with `pages`
    #[arg(long)]
    json: bool,
}

/// Writes the pages of `larder` and the commands below it.
pub(crate) fn run(args: &Args, larder: clap::Command) -> anyhow::Result<ExitCode> {
    let wrong = || Usage(format!("cannot write to {}", args.dir.display()));
    fs::create_dir_all(&args.dir).with_context(wrong)?;
    let pages = pages(larder)?;
    for (name, page) in &pages {
        fs::write(args.dir.join(name), page).with_context(wrong)?;
    }
    if args.json {
        let names: Vec<&String> = pages.iter().map(|(name, _)| name).collect();
        output::print_json(&json!({ "pages": names }))?;
    } else {
        let count = output::counted(pages.len(), "page");
        output::print(&format!("{count} written to {}.", args.dir.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every page by its file's name.
fn pages(larder: clap::Command) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut larder = larder.disable_help_subcommand(true);
    larder.build();
    let mut pages = Vec::new();
    let mut commands = vec![larder];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
        let man = clap_mangen::Man::new(command);
        let mut page = Vec::new();
        man.render(&mut page)?;
        pages.push((man.get_filename(), page));
    }
    pages.sort_unstable();
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Larder;

    /// The pages of a command and those below it.
    fn expected(command: &clap::Command, prefix: &str, names: &mut Vec<String>) {
        let name = format!("{prefix}{}", command.get_name());
        names.push(format!("{name}.1"));
        for command in command.get_subcommands() {
            expected(command, &format!("{name}-"), names);
        }
    }

    #[test]
    fn every_command_has_a_page_with_its_options_and_examples() {
        let mut names = Vec::new();
        expected(&Larder::command(), "", &mut names);
        names.sort_unstable();
        let pages = pages(Larder::command()).unwrap();
        assert_eq!(pages.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), names);
        for (name, page) in pages {
            let page = String::from_utf8(page).unwrap();
            for part in [".SH NAME", ".SH SYNOPSIS", "Example"] {
                assert!(page.contains(part), "{name} has no {part}:\n{page}");
            }
        }
    }
}
