//! What the command line understands.

use std::process::ExitCode;
use std::time::Duration;

use bytesize::ByteSize;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand};
use larder_core::store::policy::PolicyName;

use crate::commands::{
    bench, ca, completions, config, coordinator, dev, doctor, lookup, man, metrics, node, pin, plan, policy,
    replay, size, status, top, unpin, r#where,
};
use crate::logging::LogOptions;

/// Keeps the KV cache of LLM engines, and hands it to any engine that needs it next.
#[derive(Debug, Parser)]
#[command(
    name = "larder",
    version,
    after_help = "\
Examples:
  larder replay --dev 4            Play a generated trace through four nodes, check every byte
  larder dev --nodes 1             Run a development cluster here until Ctrl-C
  larder status                    Show the newest development cluster
  larder top                       Watch its nodes
  larder plan trace.jsonl          Predict a trace's hit rates by policy, capacity and node count
  larder size config.json          Compute the size of a model's KV
  larder doctor --config node.toml Find this machine's problems for a node
  larder ca init --dir ca          Make a certificate authority for a cluster
  larder help replay               Show the options of `replay`

Exit status:
  0  success
  1  the run failed: a wrong byte, a failed request, a process that died
  2  wrong arguments, configuration or input file"
)]
pub(crate) struct Larder {
    #[command(flatten)]
    pub(crate) logging: LogOptions,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The command to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Replay(replay::Args),
    Dev(dev::Args),
    Status(status::Args),
    Top(top::Args),
    Lookup(lookup::Args),
    Where(r#where::Args),
    Pin(pin::Args),
    Unpin(unpin::Args),
    Policy(policy::Args),
    Doctor(doctor::Args),
    Metrics(metrics::Args),
    Bench(bench::Args),
    Plan(plan::Args),
    Size(size::Args),
    Config(config::Args),
    Ca(ca::Args),
    Node(node::Args),
    Coordinator(coordinator::Args),
    Completions(completions::Args),
    Man(man::Args),
}

impl Command {
    /// The log level without any other choice.
    pub(crate) fn default_log_level(&self) -> &'static str {
        match self {
            Self::Node(_) | Self::Coordinator(_) => "info",
            _ => "warn",
        }
    }

    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Replay(args) => replay::run(&args),
            Self::Dev(args) => dev::run(args),
            Self::Status(args) => status::run(&args),
            Self::Top(args) => top::run(&args),
            Self::Lookup(args) => lookup::run(&args),
            Self::Where(args) => r#where::run(&args),
            Self::Pin(args) => pin::run(&args),
            Self::Unpin(args) => unpin::run(&args),
            Self::Policy(args) => policy::run(&args),
            Self::Doctor(args) => doctor::run(&args),
            Self::Metrics(args) => metrics::run(&args),
            Self::Bench(args) => bench::run(&args),
            Self::Plan(args) => plan::run(&args),
            Self::Size(args) => size::run(&args),
            Self::Config(args) => config::run(&args),
            Self::Ca(args) => ca::run(&args),
            Self::Node(args) => node::run(&args),
            Self::Coordinator(args) => coordinator::run(&args),
            Self::Completions(args) => completions::run(&args),
            Self::Man(args) => man::run(&args),
        }
    }
}

/// Parses bytes as people write them: `4096`, `64KiB`, `1.5 GB`; at least 1.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("must be at least 1 byte".into()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(_) => Err("not a number of bytes such as 4096, 64KiB or 1.5GB".into()),
    }
}

/// Parses a time as people write it: `500ms`, `90s`, `10m`, `1h`; at least a millisecond.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let wrong = || "not a time such as 500ms, 90s, 10m or 1h".to_owned();
    let unit = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..unit].parse().map_err(|_| wrong())?;
    let unit_ms = match &text[unit..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    let time = number.checked_mul(unit_ms).filter(|&ms| ms > 0).ok_or_else(wrong)?;
    Ok(Duration::from_millis(time))
}

/// The policies of a node, by name.
pub(crate) fn policy() -> impl TypedValueParser<Value = PolicyName> {
    let values = PolicyName::ALL.map(|name| PossibleValue::new(name.as_str()).help(name.about()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<PolicyName>())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use clap::CommandFactory as _;

    use super::*;

    fn refused(line: &str) -> String {
        Larder::try_parse_from(line.split(' ')).unwrap_err().to_string()
    }

    #[test]
    fn the_definition_is_consistent() {
        Larder::command().debug_assert();
    }

    #[test]
    fn every_help_renders_and_shows_examples() {
        let mut larder = Larder::command();
        larder.build();
        for command in larder.get_subcommands_mut().filter(|command| command.get_name() != "help") {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Example"), "{} has no example:\n{help}", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{argument} is not explained");
            }
        }
        let help = Larder::command().render_long_help().to_string();
        assert!(help.contains("Exit status") && !help.contains("--parent"), "{help}");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(bytes("4096"), Ok(4_096));
        assert_eq!(bytes("64KiB"), Ok(65_536));
        assert_eq!(bytes("1.5 GB"), Ok(1_500_000_000));
        assert!(bytes("0").is_err() && bytes("many").is_err() && bytes("-1").is_err());
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        let ms = |text| time(text).map(|time| time.as_millis());
        assert_eq!(
            (ms("500ms"), ms("90s"), ms("10m"), ms("2h")),
            (Ok(500), Ok(90_000), Ok(600_000), Ok(7_200_000))
        );
        for text in ["", "5", "0s", "s", "-1s", "1.5s", "1d", "99999999999999999999s", "9999999999999999h"] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    /// Commands below which there are no others.
    fn leaves(command: &clap::Command, name: &str, found: &mut Vec<(String, clap::Command)>) {
        if command.get_subcommands().next().is_none() {
            found.push((name.to_owned(), command.clone()));
        }
        for below in command.get_subcommands() {
            leaves(below, format!("{name} {}", below.get_name()).trim_start(), found);
        }
    }

    #[test]
    fn every_command_prints_json_but_servers_and_what_prints_scripts() {
        let mut found = Vec::new();
        leaves(&Larder::command(), "", &mut found);
        let without =
            found.iter().filter(|(_, command)| command.get_arguments().all(|arg| arg.get_id() != "json"));
        let without: Vec<&str> = without.map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            without,
            ["node", "coordinator", "completions"],
            "servers say in JSON when they are ready"
        );
    }

    /// The `larder` lines of a text's code blocks, continued lines as one.
    fn lines_of_code(text: &str) -> Vec<String> {
        let code = text.split("```").skip(1).step_by(2).filter(|block| block.starts_with("sh\n"));
        let joined = code.map(|block| block.replace("\\\n", " ")).collect::<Vec<_>>().join("\n");
        joined.lines().map(str::trim).filter(|line| line.starts_with("larder ")).map(str::to_owned).collect()
    }

    #[test]
    fn every_command_that_the_documentation_shows_is_one() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let book = fs::read_dir(root.join("docs/book/src")).unwrap().map(|entry| entry.unwrap().path());
        let pages = book.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
        let pages = pages.chain([root.join("README.md"), root.join("deploy/README.md")]);
        let mut seen = 0;
        for page in pages {
            for line in lines_of_code(&fs::read_to_string(&page).unwrap()) {
                let command = line.split(" #").next().unwrap_or_default();
                let command = command.split(['>', '<', '|', '&', ';']).next().unwrap_or_default();
                // Words in capitals stand for an address, and the shell fills in `$(...)`.
                let command = command.replace("ADDR", "127.0.0.1:7600").replace('"', "");
                if let Err(error) = Larder::try_parse_from(command.split_whitespace()) {
                    panic!("{}: {line}\n{error}", page.display());
                }
                seen += 1;
            }
        }
        assert!(seen > 40, "only {seen} commands were found");
    }

    #[test]
    fn capacity_cannot_be_chosen_for_a_cluster_that_runs_already() {
        for option in ["--chunks-per-node 5", "--policy lru", "--dev 1"] {
            let error = refused(&format!("larder replay --coordinator 127.0.0.1:1 {option}"));
            assert!(error.contains("cannot be used with"), "{option}: {error}");
        }
        let block_size = "larder replay --coordinator 127.0.0.1:1 --block-bytes 4096";
        assert!(Larder::try_parse_from(block_size.split(' ')).is_ok(), "the namespace has it, not the node");
    }

    #[test]
    fn every_policy_of_a_node_can_be_chosen_by_its_name() {
        for name in PolicyName::ALL {
            let chosen = Larder::try_parse_from(["larder", "dev", "--policy", name.as_str()]);
            assert!(chosen.is_ok(), "{name}");
        }
    }

    #[test]
    fn bad_arguments_are_refused_with_what_would_be_right() {
        assert!(refused("larder replay --block-bytes many").contains("64KiB"));
        assert!(
            refused("larder replay --policy random").contains("possible values: adaptive, fifo, filo, lru")
        );
        assert!(refused("larder dev --nodes 65").contains("1..=64"));
        assert!(refused("larder statsu").contains("status"));
        assert!(refused("larder replay trace.jsonl --seed 3").contains("cannot be used with"));
    }
}
