// The console's frame: a page for each hash of the address.

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { takeToken } from "./api";
import { Cluster } from "./cluster";
import { Prompt } from "./prompt";
import { Tenants } from "./tenants";
import { WhatIfPage } from "./whatif";
import { Why } from "./why";
import "./style.css";

const PAGES = {
  cluster: { title: "Cluster", page: Cluster },
  why: { title: "Why was this a miss?", page: Why },
  prompt: { title: "Prompt explorer", page: Prompt },
  tenants: { title: "Tenants and namespaces", page: Tenants },
  "what-if": { title: "What if?", page: WhatIfPage },
} as const;

type Name = keyof typeof PAGES;

const chosen = (): Name => {
  const name = location.hash.slice(1);
  return name in PAGES ? (name as Name) : "cluster";
};

function Console() {
  const [name, setName] = useState<Name>(chosen());
  const [tokens, setTokens] = useState(0);
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    const change = () => {
      if (takeToken()) setTokens((before) => before + 1);
      setName(chosen());
      heading.current?.focus();
    };
    // Digits choose pages, except while the user writes into a field.
    const key = (event: KeyboardEvent) => {
      const writes = /^(INPUT|TEXTAREA|SELECT)$/.test((event.target as Element).tagName);
      const page = Object.keys(PAGES)[Number(event.key) - 1];
      if (page && !writes && !event.ctrlKey && !event.altKey && !event.metaKey) location.hash = page;
    };
    addEventListener("hashchange", change);
    addEventListener("keydown", key);
    return () => {
      removeEventListener("hashchange", change);
      removeEventListener("keydown", key);
    };
  }, []);
  const { title, page: Page } = PAGES[name];
  return (
    <>
      <header>
        <strong>Larder</strong>
        <nav aria-label="Pages">
          {Object.entries(PAGES).map(([key, { title }]) => (
            <a key={key} href={`#${key}`} aria-current={key === name ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
      </header>
      <main>
        <h1 tabIndex={-1} ref={heading}>
          {title}
        </h1>
        <Page key={tokens} />
      </main>
    </>
  );
}

takeToken();
render(<Console />, document.getElementById("app")!);
