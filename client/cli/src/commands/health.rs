//! `larder health`: one word about a cluster or a node, for probes and scripts.

use std::process::ExitCode;

use crate::failure::{FAILED, Usage};
use crate::output;
use crate::survey::Servers;

/// Print one word about a cluster or a node: healthy, degraded or down
///
/// `degraded`: something is wrong, but at least one node serves. `down`: the coordinator does not answer or knows no node, no
/// asked node answers and is ready, or no cluster is found. Standard error has a line for each problem.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder health                          The cluster of the context, or the newest development cluster
  larder health --node 127.0.0.1:9440    One node, for a probe
  larder health --json                   One object with `health` and `troubles`
  [ \"$(larder health)\" != down ]         True if the cluster serves, well or not

Exit status: 0 if healthy; 1 if degraded or down; 2 after wrong arguments.")]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,

    /// Print JSON: one object with `health` and `troubles`
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (health, troubles) = match args.servers.targets().and_then(|targets| targets.survey()) {
        Ok(survey) => {
            let troubles = survey.troubles();
            (survey.health(&troubles), troubles)
        }
        Err(error) if error.is::<Usage>() => return Err(error),
        Err(error) => ("down", vec![format!("{error:#}")]),
    };
    if args.json {
        output::print_json(&serde_json::json!({"health": health, "troubles": troubles}))?;
    } else {
        output::print(health)?;
        troubles.iter().for_each(|trouble| output::note(format_args!("{trouble}")));
    }
    Ok(if health == "healthy" { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::survey::{Survey, Surveyed};

    fn node(ready: Option<bool>) -> Surveyed {
        let said = ready.ok_or_else(|| "no answer".to_owned()).map(|ready| {
            let words = json!({"name": "a", "ready": ready, "uptime_seconds": 1.0, "actors": []});
            (words.clone(), serde_json::from_value(words).unwrap())
        });
        Surveyed { name: "a".into(), http: "a:1".into(), member: None, said }
    }

    fn of(nodes: Vec<Surveyed>) -> &'static str {
        let survey = Survey { coordinator: None, nodes };
        survey.health(&survey.troubles())
    }

    #[test]
    fn a_cluster_is_down_when_no_node_serves_and_degraded_when_some_do_not() {
        assert_eq!(of(vec![node(Some(true))]), "healthy");
        assert_eq!(of(vec![node(Some(true)), node(None)]), "degraded");
        assert_eq!(of(vec![node(Some(true)), node(Some(false))]), "degraded");
        assert_eq!(of(vec![node(None)]), "down");
        assert_eq!(of(vec![node(Some(false))]), "down");
        assert_eq!(of(vec![]), "down", "no node has joined, or all have left");
    }
}
