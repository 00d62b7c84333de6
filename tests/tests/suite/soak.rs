//! The command line of `tests/soak`.

use std::process::Command;

#[test]
fn arguments_that_make_no_sense_are_refused_and_the_help_teaches() {
    let run = |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_soak")).args(arguments).output().unwrap();
    let help = run(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(text.contains("tests/soak faults --minutes 20") && text.contains("failed requests"), "{text}");
    for wrong in [&["backwards"][..], &["--minutes", "-1"], &["--nodes", "1"], &["--rounds", "0"]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
