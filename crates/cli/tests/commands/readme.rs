//! Commands of the README that need no model and no network do what they are said to do.
use crate::program::*;
use std::path::Path;

/// The commands of the README's block that contains `part`.
fn commands(part: &str) -> Vec<String> {
    let readme =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let block = readme.split("```").skip(1).step_by(2).find(|block| block.contains(part));
    let lines = block.unwrap_or_else(|| panic!("the README has no {part}")).lines();
    let lines = lines.map(|line| line.split('#').next().unwrap_or_default().trim().to_owned());
    lines.filter(|line| line.starts_with("kvist ")).collect()
}

/// The words of a command; what is quoted is one.
fn arguments(command: &str) -> Vec<String> {
    let words = command.split('"').enumerate().flat_map(|(at, part)| match at % 2 {
        1 => vec![part.to_owned()],
        _ => part.split_whitespace().map(str::to_owned).collect(),
    });
    words.skip(1).collect()
}

/// In this order, in one folder: the later ones read what the earlier ones wrote.
#[test]
fn what_was_computed_is_not_computed_again() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("system.txt"), "Every value has one owner. ".repeat(20)).unwrap();
    let commands = commands("--save-session");
    assert_eq!(commands.len(), 5);
    let mut texts = Vec::new();
    for command in &commands {
        let mut arguments = arguments(command);
        match &*arguments[0] {
            // A server would not end. The directory of a tier is not made then.
            "serve" => arguments.push("--dry-run".into()),
            "run" => arguments.extend(["-n", "8", "--json"].map(String::from)),
            _ => {}
        }
        let done = kvist().current_dir(folder.path()).args(&arguments).output().unwrap();
        let (text, errors) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{command}: {errors}");
        texts.push(text.into_owned());
    }
    let report = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let (saved, resumed) = (report(&texts[0]), report(&texts[1]));
    // All but the token that was drawn last.
    let known = saved["prompt_tokens"].as_u64().unwrap() + 8 - 1;
    assert_eq!(resumed["resumed_tokens"], known, "{resumed}");
    assert!(folder.path().join("system.kvp").exists() && texts[3].contains("total bound"), "{}", texts[3]);
}
