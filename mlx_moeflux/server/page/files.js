// Text files that a question brings along. A file is {name, text}.

import { bytes } from "./engine.js";

const MOST_BYTES = 2_000_000; // of all files of one question

// Reads chosen or dropped files. held: Those that the question has already. Returns
// {files, refused}: what can be added, and a sentence for each of the others.
export async function readFiles(chosen, held) {
  let room = MOST_BYTES - held.reduce((sum, file) => sum + sizeOf(file), 0);
  const files = [];
  const refused = [];
  for (const one of chosen) {
    if (one.size > room) {
      refused.push(`“${one.name}” has ${bytes(one.size)}: ` +
        `the files of a question may have ${bytes(MOST_BYTES)}.`);
      continue;
    }
    try {
      files.push({ name: nameOf(one), text: textOf(await one.arrayBuffer()) });
      room -= one.size;
    } catch (error) {
      refused.push(`“${one.name}” ${error instanceof TypeError ? "is no text in UTF-8." :
        "cannot be read."}`);
    }
  }
  return { files, refused };
}

// Throws a TypeError for bytes that are no text.
function textOf(buffer) {
  const text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
  if (text.includes("\0")) throw new TypeError("binary");
  return text;
}

// A name is one line of the question.
const nameOf = ({ name }) => name.replace(/[\p{Cc}\u2028\u2029]+/gu, " ");

export const sizeOf = (file) => new TextEncoder().encode(file.text).length;

// What the model reads of a question: its files, each in a fence that nothing in it ends, and its
// words.
export function withFiles({ content, files = [] }) {
  return [...files.map(fenced), content].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
