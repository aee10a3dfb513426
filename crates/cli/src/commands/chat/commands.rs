//! Slash commands.
use crate::options::Bytes;
use crate::output;
use anyhow::Context;
use kvist_engine::chat::Chat;
use std::path::Path;

const HELP: &str = "\
/fork [NAME]            continue in a new branch; nothing is copied
/branches               list them
/switch NAME            continue in another one
/drop NAME              delete one, and free the cells that only it uses
/cache                  the contents of the cache, by sequence
/undo                   remove the last question and its answer
/system TEXT            system message: the model reads it first
/save-transcript FILE   write this branch to a file
/help                   this list
/quit                   or end of input
//TEXT                  send /TEXT as a message";

/// Additional help where line editing is available.
const HELP_WITH_LINES: &str = "
a \\ at a line's end      continues on the next line
\\\\ at the end           is a \\, and ends the message
arrows, Ctrl-R          find what was typed before";

/// Executes a command; returns the message to show.
pub fn execute(chat: &mut Chat, command: &str, rest: &str, edits: bool) -> anyhow::Result<String> {
    let name = (!rest.is_empty()).then_some(rest);
    Ok(match command {
        "/help" => format!("{HELP}{}", if edits { HELP_WITH_LINES } else { "" }),
        "/fork" => {
            let before = chat.session().counters().bytes_moved;
            let branch = chat.fork(name)?.name.clone();
            format!("on {branch}; {} copied", Bytes(chat.session().counters().bytes_moved - before))
        }
        "/branches" => {
            let current = chat.current().name.clone();
            let line = |b: &kvist_engine::chat::Branch| {
                let mark = if b.name == current { '*' } else { ' ' };
                format!("{mark} {} ({} messages)", b.name, b.messages.len())
            };
            chat.branches().iter().map(line).collect::<Vec<_>>().join("\n")
        }
        "/switch" => {
            chat.switch(rest)?;
            format!("on {rest}")
        }
        "/drop" => {
            chat.drop_branch(rest)?;
            format!("deleted {rest}")
        }
        "/cache" => {
            let groups = chat.session().report();
            let one = groups.len() == 1;
            let text = |(g, report): (usize, &kvist_cache::Report)| {
                let head = if one { String::new() } else { format!("layer group {g}\n") };
                head + report.to_string().trim_end()
            };
            groups.iter().enumerate().map(text).collect::<Vec<_>>().join("\n")
        }
        "/undo" if chat.undo() => "undone".into(),
        "/undo" => "there is nothing to undo".into(),
        "/system" => {
            chat.set_system(name.map(str::to_string))?;
            "applies from the next turn on".into()
        }
        "/save-transcript" => {
            let path = name.context("name a file: /save-transcript FILE")?;
            output::write_file(Path::new(path), chat.transcript().as_bytes())?;
            format!("wrote {path}")
        }
        other => anyhow::bail!("there is no {other}; /help lists the commands"),
    })
}
