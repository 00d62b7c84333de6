//! `larder completions`: the script with which a shell completes the command line.

use std::process::ExitCode;

use clap_complete::Shell;

use crate::output;

/// Print a shell's completion script for `larder`
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples (install, then start a new shell):
  larder completions bash > ~/.local/share/bash-completion/completions/larder
  larder completions zsh > ~/.zfunc/_larder          # with `fpath+=~/.zfunc` before compinit in ~/.zshrc
  larder completions fish > ~/.config/fish/completions/larder.fish
  larder completions elvish >> ~/.config/elvish/rc.elv
  larder completions powershell >> $PROFILE")]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

/// Prints the completions of `larder`.
pub(crate) fn run(args: &Args, larder: clap::Command) -> anyhow::Result<ExitCode> {
    output::print(&completions(args.shell, larder)?)?;
    Ok(ExitCode::SUCCESS)
}

fn completions(shell: Shell, mut larder: clap::Command) -> anyhow::Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut larder, "larder", &mut script);
    Ok(String::from_utf8(script)?)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, ValueEnum as _};

    use super::*;
    use crate::args::Larder;

    #[test]
    fn every_shell_gets_completions_with_the_commands_in_them() {
        for &shell in Shell::value_variants() {
            let script = completions(shell, Larder::command()).unwrap();
            assert!(script.contains("replay") && script.contains("chunks-per-node"), "{shell}");
        }
    }
}
