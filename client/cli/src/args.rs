//! The arguments and commands of the command line.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use larder_net::trace::{ExportError, Exporter};

use crate::commands::{
    bench, ca, completions, config, console, coordinator, dev, doctor, drain, events, explain, forget,
    health, list, lookup, man, metrics, node, pin, plan, policy, purge, reload, replay, restart, size,
    status, top, unpin, r#where,
};
use crate::logging::LogOptions;
use crate::tracing::{self, host_name};

/// Keeps the KV cache of LLM engines, and hands it to any engine that needs it next.
#[derive(Debug, Parser)]
#[command(
    name = "larder",
    version,
    after_help = "\
Examples:
  larder replay --dev 4            Play a generated trace through four nodes, check every byte
  larder dev --nodes 1             Run a development cluster here until Ctrl-C
  larder status                    Show a cluster, and what is wrong with it
  larder top                       Watch its nodes
  larder explain                   Say why prompts were misses
  larder plan trace.jsonl          Predict a trace's hit rates by policy, capacity and node count
  larder size config.json          Compute the size of a model's KV
  larder doctor --config node.toml Find this machine's problems for a node
  larder ca init --dir ca          Make a certificate authority for a cluster
  larder help replay               Show the options of `replay`

Commands that ask a cluster choose it by --coordinator, by LARDER_COORDINATOR, by the context file
(LARDER_CONTEXT, or ~/.config/larder/context.toml), or else take the newest development cluster.

Exit status:
  0  success; for `status` and `health`: all is well
  1  the run failed: a wrong byte, a failed request, a process that died, a degraded cluster
  2  wrong arguments, configuration or input file
  75 a node after `larder restart`: its supervisor starts it again"
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
    Health(health::Args),
    Top(top::Args),
    List(list::Args),
    Events(events::Args),
    Lookup(lookup::Args),
    Where(r#where::Args),
    Explain(explain::Args),
    Console(console::Args),
    Pin(pin::Args),
    Unpin(unpin::Args),
    Policy(policy::Args),
    Purge(purge::Args),
    Drain(drain::Args),
    Forget(forget::Args),
    Restart(restart::Args),
    Reload(reload::Args),
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
    /// The log filter if nothing else sets one.
    pub(crate) fn default_log_filter(&self) -> String {
        match self {
            Self::Node(args) => args.log_filter(),
            Self::Coordinator(_) => node::LOG_FILTER.to_owned(),
            _ => "warn".to_owned(),
        }
    }

    /// Starts to send the spans of this process, if a collector is set. Does not report a wrong configuration file: the command
    /// itself does.
    pub(crate) fn start_tracing(&self) -> Result<Option<Exporter>, ExportError> {
        let (config, name, instance) = match self {
            Self::Node(args) => {
                let Some(config) = args.config_file() else { return Ok(None) };
                let instance = config.name.clone();
                (config.tracing, "larder-node", instance.unwrap_or_else(host_name))
            }
            Self::Coordinator(args) => {
                let Some(config) = args.config_file() else { return Ok(None) };
                (config.tracing, "larder-coordinator", host_name())
            }
            Self::Replay(args) => {
                let instance = format!("{}-{}", host_name(), std::process::id());
                (args.tracing.config(), "larder-replay", instance)
            }
            _ => return Ok(None),
        };
        tracing::start(config, name, instance)
    }

    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Replay(args) => replay::run(&args),
            Self::Dev(args) => dev::run(args),
            Self::Status(args) => status::run(&args),
            Self::Health(args) => health::run(&args),
            Self::Top(args) => top::run(&args),
            Self::List(args) => list::run(&args),
            Self::Events(args) => events::run(&args),
            Self::Lookup(args) => lookup::run(&args),
            Self::Where(args) => r#where::run(&args),
            Self::Explain(args) => explain::run(&args),
            Self::Console(args) => console::run(&args),
            Self::Pin(args) => pin::run(&args),
            Self::Unpin(args) => unpin::run(&args),
            Self::Policy(args) => policy::run(&args),
            Self::Purge(args) => purge::run(&args),
            Self::Drain(args) => drain::run(&args),
            Self::Forget(args) => forget::run(&args),
            Self::Restart(args) => restart::run(&args),
            Self::Reload(args) => reload::run(&args),
            Self::Doctor(args) => doctor::run(&args),
            Self::Metrics(args) => metrics::run(&args),
            Self::Bench(args) => bench::run(&args),
            Self::Plan(args) => plan::run(&args),
            Self::Size(args) => size::run(&args),
            Self::Config(args) => config::run(&args),
            Self::Ca(args) => ca::run(&args),
            Self::Node(args) => node::run(&args),
            Self::Coordinator(args) => coordinator::run(&args),
            Self::Completions(args) => completions::run(&args, Larder::command()),
            Self::Man(args) => man::run(&args, Larder::command()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use larder_core::store::policy::PolicyName;

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
    fn every_command_but_servers_and_completions_prints_json() {
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
