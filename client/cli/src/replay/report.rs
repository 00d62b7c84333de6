//! The results of a replay, for people or for machines.

use std::collections::BTreeMap;

use comfy_table::Table;
use serde::{Deserialize, Serialize};

use super::losses::{Evicted, Loss};
use crate::output;

/// The results of a replay. Serialised, it is the one object that `--json` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Requests whose hits are known.
    pub requests: u64,
    /// Requests that ended with an error.
    pub failed_requests: u64,
    /// Tokens of all prompts.
    pub tokens_asked: u64,
    /// Tokens whose blocks were served.
    pub tokens_hit: u64,
    /// Tokens hit, by tier.
    pub tokens_hit_by_tier: BTreeMap<String, u64>,
    /// Tokens that had to be computed.
    pub tokens_computed: u64,
    /// Tokens that were not hit, by reason.
    #[serde(default)]
    pub tokens_lost: BTreeMap<Loss, u64>,
    /// The evicted tokens among these, by the rule that evicted their chunks.
    #[serde(default)]
    pub evicted: BTreeMap<String, Evicted>,
    /// Seconds of prefill that one engine would have taken for the tokens hit.
    pub prefill_seconds_avoided: f64,
    /// `tokens_hit / tokens_asked`.
    pub token_hit_rate: f64,
    /// The hit rate of a cache that never evicts, and that is empty at first.
    pub token_hit_rate_infinite: f64,
    /// Tokens hit of chunks that were in the cluster before this replay.
    #[serde(default)]
    pub tokens_from_before: u64,
    /// Served bytes that differ from the bytes that their key implies.
    pub wrong_bytes: u64,
    /// Answers that said to ask again later.
    pub busy_answers: u64,
    /// Requests whose chunks were not all saved, because a node had no room for them at any of the tries.
    pub saves_shed: u64,
    /// Tokens computed because a node was gone or did not answer.
    pub recomputed_after_failure: u64,
    /// Sessions that were opened again.
    pub sessions_reconnected: u64,
    /// Chunks that a lookup found and the lease after it could not get.
    pub lease_shortfalls: u64,
    /// Chunks per request that came from another node than the asked one.
    pub peer_chunks_per_request: f64,
    /// Chunks per request that a node evicted and another node kept instead. They went over the network too.
    #[serde(default)]
    pub forwarded_chunks_per_request: f64,
    /// Bytes of blocks read and written, from the transport's counters.
    pub bytes_moved: u64,
    /// Median time of a lookup, in microseconds.
    pub lookup_p50_us: f64,
    /// 99th percentile of the time of a lookup, in microseconds.
    pub lookup_p99_us: f64,
    /// Median time to lease and copy out a request's hits, for requests without hits of other nodes, in microseconds.
    pub fetch_p50_us: f64,
    /// 99th percentile of the same time, in microseconds.
    pub fetch_p99_us: f64,
    /// The same median for requests with hits of other nodes.
    pub peer_fetch_p50_us: f64,
    /// 99th percentile of the same time, in microseconds.
    pub peer_fetch_p99_us: f64,
    /// The longest time of both kinds of requests.
    pub longest_fetch_us: f64,
    /// Time of the replay.
    pub seconds: f64,
    /// The first block with a wrong byte.
    pub first_wrong: Option<WrongBlock>,
    /// The error of the first failed request.
    pub first_failure: Option<String>,
}

/// A block with other bytes than its key implies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongBlock {
    /// The key: the chunk's hash, in hexadecimal.
    pub chunk: String,
    /// Offset of its first wrong byte.
    pub offset: u64,
    /// Number of wrong bytes in the block.
    pub wrong_bytes: u64,
    /// Bytes of the block.
    pub block_bytes: u64,
}

impl Report {
    /// Whether no byte was wrong and no request failed.
    pub fn passed(&self) -> bool {
        self.wrong_bytes == 0 && self.failed_requests == 0
    }

    /// The results as a table, with the errors below.
    pub fn table(&self) -> String {
        let mut text = self.rows().to_string();
        if let Some(wrong) = &self.first_wrong {
            let WrongBlock { chunk, offset, wrong_bytes, block_bytes } = wrong;
            text += &format!(
                "\nwrong bytes: the first wrong block is {chunk}: {wrong_bytes} of {block_bytes} bytes, from offset {offset}"
            );
        }
        if let Some(failure) = &self.first_failure {
            text += &format!("\nfailed requests: the first one met: {failure}");
        }
        text
    }

    fn rows(&self) -> Table {
        let mut table = output::table(&["", ""]);
        let mut row = |name: &str, value: String| {
            table.add_row([name, &value]);
        };
        let rate = |tokens: u64| percent(tokens as f64 / self.tokens_asked.max(1) as f64);
        row("requests", output::count(self.requests));
        row("failed requests", output::count(self.failed_requests));
        row("tokens asked", output::count(self.tokens_asked));
        for (tier, &tokens) in &self.tokens_hit_by_tier {
            row(&format!("tokens hit, {tier}"), format!("{}  ({})", output::count(tokens), rate(tokens)));
        }
        row(
            "tokens computed",
            format!("{}  ({})", output::count(self.tokens_computed), rate(self.tokens_computed)),
        );
        for (loss, &tokens) in &self.tokens_lost {
            row(&format!("  {}", loss.about()), format!("{}  ({})", output::count(tokens), rate(tokens)));
        }
        for (rule, Evicted { tokens, ago_p50_ms, ago_p99_ms }) in &self.evicted {
            let [p50, p99] = [ago_p50_ms, ago_p99_ms].map(|&ms| output::duration(ms as f64 / 1e3));
            row(
                &format!("    by {rule}, p50 / p99 before"),
                format!("{}  ({p50} / {p99})", output::count(*tokens)),
            );
        }
        let avoided = output::count(self.prefill_seconds_avoided.round() as u64);
        row("prefill avoided", format!("{avoided} s"));
        row("token hit rate", percent(self.token_hit_rate));
        row("  of an infinite cache", percent(self.token_hit_rate_infinite));
        if self.tokens_from_before > 0 {
            row("tokens hit from before this replay", output::count(self.tokens_from_before));
        }
        if self.busy_answers > 0 || self.saves_shed > 0 {
            row("busy answers / saves shed", format!("{} / {}", self.busy_answers, self.saves_shed));
        }
        if self.recomputed_after_failure > 0 || self.sessions_reconnected > 0 {
            let tokens = output::count(self.recomputed_after_failure);
            row("tokens recomputed after a failure", tokens);
            row("sessions opened again", output::count(self.sessions_reconnected));
        }
        if self.peer_chunks_per_request > 0.0 {
            row("chunks from peers a request", format!("{:.2}", self.peer_chunks_per_request));
            row("chunks forwarded a request", format!("{:.2}", self.forwarded_chunks_per_request));
            row("fetch with peers p50 / p99", pair(self.peer_fetch_p50_us, self.peer_fetch_p99_us));
        }
        row("bytes moved", output::bytes(self.bytes_moved));
        row("lookup p50 / p99", pair(self.lookup_p50_us, self.lookup_p99_us));
        row("fetch p50 / p99", pair(self.fetch_p50_us, self.fetch_p99_us));
        row("wrong bytes", output::count(self.wrong_bytes));
        row("seconds", format!("{:.2}", self.seconds));
        output::align_right(&mut table, 1);
        table
    }
}

fn percent(fraction: f64) -> String {
    format!("{:.2} %", fraction * 100.0)
}

fn pair(p50_us: f64, p99_us: f64) -> String {
    format!("{p50_us:.1} / {p99_us:.1} µs")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::content;
    use crate::replay::Tally;
    use crate::replay::losses::Reasons;
    use crate::replay::tally::Transport;

    #[test]
    fn the_json_object_has_every_promised_field() {
        let report = Tally::new(1_000.0).finish(
            Transport::default(),
            0.25,
            Reasons::default(),
            Duration::from_secs(2),
        );
        let json = serde_json::to_value(&report).unwrap();
        let fields = [
            "requests",
            "failed_requests",
            "tokens_asked",
            "tokens_hit",
            "tokens_hit_by_tier",
            "token_hit_rate",
            "token_hit_rate_infinite",
            "tokens_from_before",
            "wrong_bytes",
            "bytes_moved",
            "lookup_p50_us",
            "lookup_p99_us",
            "fetch_p50_us",
            "fetch_p99_us",
            "seconds",
            "tokens_computed",
            "tokens_lost",
            "evicted",
            "prefill_seconds_avoided",
            "recomputed_after_failure",
            "peer_chunks_per_request",
            "forwarded_chunks_per_request",
        ];
        for field in fields {
            assert!(json.get(field).is_some(), "{field} is missing");
        }
        assert_eq!(
            json["tokens_hit_by_tier"],
            serde_json::json!({"device": 0, "disk": 0, "host": 0, "object": 0, "peer": 0})
        );
    }

    #[test]
    fn the_table_names_the_first_wrong_key() {
        let mut tally = Tally::new(1_000.0);
        tally.check(&content::chunk_hash(5), &[0; 64]);
        let moved = Transport { bytes_moved: 1 << 30, ..Transport::default() };
        let text = tally.finish(moved, 0.5, Reasons::default(), Duration::from_secs(2)).table();
        assert!(text.contains(&content::chunk_hash(5).to_string()), "{text}");
        assert!(text.contains("1.0 GiB") && text.contains("50.00 %"), "{text}");
    }
}
