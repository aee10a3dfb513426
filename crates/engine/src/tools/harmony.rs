//! Converts conversations for chat templates of the [Harmony format](kvist_model::harmony), and builds grammars
//! for its answers.
//!
//! gpt-oss's template needs what the API does not provide: a field `thinking` with the reasoning before a call,
//! messages with a single call that is directly followed by its result, and a description of every function.
use super::{Tool, text_of};
use crate::grammar::{Grammar, Schema};
use kvist_model::harmony::{CHANNEL, CONSTRAIN, END, MESSAGE, START};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Converts the messages to the form that the template expects.
pub(crate) fn for_template(messages: &[Value]) -> Vec<Value> {
    let mut out = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let [message, after @ ..] = rest {
        rest = after;
        let calls = message["tool_calls"].as_array().filter(|calls| !calls.is_empty());
        let Some(calls) = calls else {
            out.push(message.clone());
            continue;
        };
        let n_results = after.iter().take_while(|message| message["role"] == "tool").count();
        let (results, after) = after.split_at(n_results);
        rest = after;
        let mut of_call: HashMap<&str, Vec<usize>> = HashMap::new();
        for (at, result) in results.iter().enumerate() {
            if let Some(id) = result["tool_call_id"].as_str() {
                of_call.entry(id).or_default().push(at);
            }
        }
        let mut taken = vec![false; results.len()];
        for (n, call) in calls.iter().enumerate() {
            out.push(calling(message, call, n == 0));
            // The template names a result after the call before it.
            for at in call["id"].as_str().and_then(|id| of_call.remove(id)).into_iter().flatten() {
                out.push(results[at].clone());
                taken[at] = true;
            }
        }
        let others = results.iter().zip(taken).filter(|(_, taken)| !taken);
        out.extend(others.map(|(result, _)| result.clone()));
    }
    out
}

/// A message with only this call. The `first` one also gets the message's other fields, and the reasoning and
/// text before the calls.
fn calling(message: &Value, call: &Value, first: bool) -> Value {
    let mut one = json!({"role": message["role"], "tool_calls": [call], "content": ""});
    let (true, Some(fields), Some(one_fields)) = (first, message.as_object(), one.as_object_mut()) else {
        return one;
    };
    const TEXTS: [&str; 4] = ["thinking", "reasoning_content", "reasoning", "content"];
    let text = |name: &str| fields.get(name).map(text_of).filter(|text| !text.is_empty());
    // The first three names mean the same text. For a message with a call, the template accepts either thinking
    // or content and writes it as reasoning, so both are joined.
    let thought = TEXTS[..3].iter().find_map(|name| text(name));
    let before: Vec<String> = thought.into_iter().chain(text("content")).collect();
    for (name, value) in fields {
        if !TEXTS.contains(&name.as_str()) && !one_fields.contains_key(name) {
            one_fields.insert(name.clone(), value.clone());
        }
    }
    if !before.is_empty() {
        one_fields.insert("thinking".into(), before.join("\n").into());
    }
    one
}

/// Adds an empty description to tools without one, because the template requires it.
pub(crate) fn described(tools: &[Value]) -> Vec<Value> {
    let described = |tool: &Value| {
        let mut tool = tool.clone();
        if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut)
            && !function.get("description").is_some_and(Value::is_string)
        {
            function.insert("description".into(), "".into());
        }
        tool
    };
    tools.iter().map(described).collect()
}

/// A grammar of any number of messages in the given `channels`, followed by `start`.
fn before(start: &str, channels: &str) -> Grammar {
    let lark = format!(
        "start: before* {start}\nbefore: channel {channels} message text end begin \"assistant\"\ntext: /(?s:.*)/\n"
    );
    let marks = [
        ("channel", CHANNEL),
        ("message", MESSAGE),
        ("end", END),
        ("begin", START),
        ("constrain", CONSTRAIN),
    ];
    marks.into_iter().fold(Grammar::new(lark), |grammar, (rule, mark)| grammar.mark(rule, mark))
}

/// Grammar of an answer whose final message matches the schema. The model may reason first.
pub(crate) fn answer(schema: Schema) -> Grammar {
    let mut grammar = before("final", "\"analysis\"");
    grammar.rule("final: channel \"final\" (\" \"? constrain \"json\")? message answer\n");
    grammar.with("answer", schema)
}

/// Grammar of an answer that calls one of the functions. The model may reason and write text first. A call ends
/// the answer, so there is only one.
pub(super) fn calls(chosen: Vec<&Tool>) -> Grammar {
    let names: Vec<String> = (0..chosen.len()).map(|at| format!("call_{at}")).collect();
    let mut grammar = before(&format!("({})", names.join(" | ")), "(\"analysis\" | \"commentary\")");
    grammar.rule("json: (\" \"? constrain \"json\" | \" json\")?\n");
    for (at, tool) in chosen.into_iter().enumerate() {
        let recipient = Value::from(format!(" to=functions.{}", tool.name));
        let in_channel = Value::from(format!("commentary to=functions.{}", tool.name));
        grammar.rule(&format!(
            "call_{at}: (channel {in_channel} | {recipient} channel \"commentary\") json message args_{at}\n"
        ));
        grammar = grammar.with(&format!("args_{at}"), tool.parameters.clone());
    }
    grammar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_is_a_message_before_its_results() {
        let call =
            |id: &str| json!({"id": id, "type": "function", "function": {"name": id, "arguments": "{}"}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": id});
        let question = json!({"role": "user", "content": "Why?"});
        let messages = [
            question.clone(),
            json!({"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": [call("a"), call("b")]}),
            result("b"),
            result("a"),
            result("c"),
            json!({"role": "assistant", "content": "So.", "reasoning_content": "Done."}),
        ];
        let expected = [
            question.clone(),
            json!({"role": "assistant", "tool_calls": [call("a")], "content": "", "thinking": "Two.\nI look."}),
            result("a"),
            json!({"role": "assistant", "tool_calls": [call("b")], "content": ""}),
            result("b"),
            result("c"),
            messages[5].clone(),
        ];
        assert_eq!(for_template(&messages), expected);
        // Reasoning or content, under any name, in parts, or neither.
        for (fields, thinking) in [
            (json!({"content": null, "reasoning": "R"}), Some("R")),
            (json!({"reasoning_content": "R", "reasoning": "R", "content": ""}), Some("R")),
            (
                json!({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
                Some("a\nb"),
            ),
            (json!({"thinking": "T"}), Some("T")),
            (json!({}), None),
        ] {
            let mut message = json!({"role": "assistant", "tool_calls": [call("a")]});
            message.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let rendered = for_template(&[message]);
            assert_eq!(rendered[0].get("thinking").and_then(Value::as_str), thinking, "{fields}");
            assert_eq!(rendered[0]["content"], "");
        }
        assert_eq!(for_template(&messages[..1]), [question]);
    }

    /// Each call is copied once. Copying all calls into every message would take 200 million copies for 20,000
    /// calls.
    #[test]
    fn many_calls_are_as_many_messages() {
        let call = |n: usize| json!({"id": format!("c{n}"), "function": {"name": "f", "arguments": "{}"}});
        let calls: Vec<Value> = (0..20_000).map(call).collect();
        let result = |n: usize| json!({"role": "tool", "tool_call_id": format!("c{n}"), "content": "r"});
        let mut messages = vec![json!({"role": "assistant", "tool_calls": calls})];
        messages.extend((0..20_000).rev().map(result));
        let rendered = for_template(&messages);
        assert_eq!(rendered.len(), 40_000);
        for (n, pair) in rendered.chunks_exact(2).enumerate() {
            assert_eq!((&pair[0]["tool_calls"][0], &pair[1]), (&call(n), &result(n)));
        }
    }

    #[test]
    fn every_function_is_described() {
        let tool = |function: Value| json!({"type": "function", "function": function});
        let tools = [tool(json!({"name": "f"})), tool(json!({"name": "g", "description": "G."}))];
        let expected = [tool(json!({"name": "f", "description": ""})), tools[1].clone()];
        assert_eq!(described(&tools), expected);
    }
}
