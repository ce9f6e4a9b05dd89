# ruff: noqa: RUF001  (words in many scripts)
"""The words that tell what a prompt wants, each with one role. A prompt becomes a string of roles, which patterns read.

"Write a function in Python" is ``B.nPL``: build verb, any word, code noun, preposition, language. Roles stand for the same
things in every language of the tables, so one pattern serves all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ANY_WORD = "."
NUMBER = "#"
STOP = "|"  # the end of a sentence or line

# Roles by letter: the words in several natural languages, lower case. A word has one role.
# fmt: off
_WORDS: dict[str, str] = {
    # Build: make something that was not there
    "B": """
        write wrote writing create creating generate build make develop coding give provide produce craft show need
        wants send design construct define declare scaffold gimme author set escribe escriba escribir escríbeme crea
        crear créame genera generar haz hazme dame necesito quiero desarrolla écris écrire écrivez crée créer créez
        génère générer donne donnez développe besoin faire fais rédige schreib schreibe schreiben erstelle erstellen
        erstell generiere entwickle programmiere gib brauche baue zeig escreva escrever escreve crie criar gere
        gerar preciso faça desenvolva scrivi scrivere scrivimi creami creare generare sviluppa dammi fammi napisz
        stwórz utwórz schrijf maak yaz yazın oluştur напиши напишите написать создай создайте создать сделай нужен
        нужна нужно сгенерируй разработай viết tạo tulis buat buatkan skriv""",
    # Modify: change what is there
    "M": """
        fix fixing debug refactor rewrite port convert translate optimize optimise complete completing finish add
        extend modify update simplify shorten shortened restructure migrate replace vectorize vectorise parallelize
        parallelise transpile test repair correct turn rework adapt inline change fill improve mock containerize
        dockerize configure reduce tidy corrige corregir arregla completa completar convierte traduce optimiza
        refactoriza añade modifica corriger corrigez complète convertis traduis refactorise ajoute modifie
        korrigiere korrigier behebe vervollständige übersetze optimiere refaktoriere ergänze ändere konvertiere
        corrija converta traduza otimize adicione modifique correggi converti ottimizza aggiungi исправь исправьте
        допиши перепиши оптимизируй переведи добавь popraw düzelt""",
    # Explain: talk about it
    "X": """
        explain explaining describe describes audit critique trace analyze analyse analysis understand why interpret
        evaluate discuss spot elaborate clarify means meaning difference differences comparison teach learn pros
        cons complexity thoughts opinion safe justify advantages disadvantages better versus vs explica explicar
        explícame analiza compara diferencia porqué significa qué explique expliquer expliquez décris résume
        différence pourquoi erkläre erklär erklären beschreibe analysiere unterschied warum bedeutet fasse descreva
        analise diferença spiega spiegami descrivi differenza perché объясни объясните опиши почему разница расскажи
        açıkla fark wyjaśnij różnica uitleggen""",
    # What a program is called
    "n": """
        function functions script scripts program programs programme class method methods code query queries command
        commands algorithm algorithms formula component components application app website webpage api endpoint
        endpoints module library tests interface config configuration schema parser scraper bot cli game macro
        macros pipeline workflow server hook función funciones programa código consulta comando clase fonction
        fonctions requête commande funktion funktionen skript programm abfrage befehl klasse função funzione codice
        programma funkcję funkcja skrypt kod functie fonksiyon betik функцию функция функции скрипт программу
        программа запрос код команду команда класс hàm fungsi skrip kode expresión expression ausdruck espressione
        expressão выражение implementation calculator""",
    # What is nothing but code
    "N": """
        regex regexp regexes oneliner liner liners snippet snippets subroutine dockerfile makefile crontab cronjob
        middleware decorator codebase unittest unittests stylesheet userscript playbook webhook linkedlist hashmap
        trie mutex microservice pseudocode boilerplate jsx reducer serializer deserializer linter tokenizer lexer
        compiler stub vlookup xlookup backend frontend crud daemon semaphore iterator webapp ringbuffer struct enum
        typedef docstring docstrings traceback stacktrace navbar""",
    # Programming languages and tools, never anything else
    "L": """
        python python3 py javascript js typescript ts c++ cpp c++11 c++14 c++17 c++20 c++23 c# csharp f# golang php
        perl kotlin haskell lua bash zsh powershell sql postgres postgresql mysql sqlite tsql plsql html html5 css
        css3 scss nodejs django flask fastapi pandas numpy matlab vba terraform kubernetes docker yaml awk sed jq
        fortran cobol elixir erlang clojure ocaml graphql svg tailwind jquery junit pytest pytorch tensorflow prolog
        cmake git kubectl ffmpeg tmux vim dplyr ggplot ggplot2 cron verilog vhdl solidity objc mongodb nginx
        powerquery tailwindcss bootstrap react reactjs vue vuejs angular svelte nextjs laravel rails wordpress asm
        x86 cuda opengl glsl wasm elasticsearch redis ansible helm github gitlab selenium playwright puppeteer
        express jest linux ubuntu unix""",
    # Words for languages and tools that are ordinary words too
    "l": """
        java ruby rust swift scala julia dart go r c excel shell spark assembly basic sheets terminal unity spring
        command-line spreadsheet latex""",
    # What programs work on
    "c": """
        array arrays lists string strings integer integers tuple tuples dict dictionary dictionaries input inputs
        output parameter parameters argument arguments return returns returning returned element elements database
        databases column columns row rows recursion recursive recursively substring palindrome palindromes fibonacci
        binary matrix index boolean directory folder url duplicates vowels characters timestamp thread threads tree
        linked node nodes stack queue heap sorts sorted file files prints reads parses validates takes accepts
        checks converts calculates computes substrings lowercase uppercase anagrams anagram duplicate variable
        variables pointer pointers async asynchronous button login fetch request requests http emails ip password
        hash cache caching iban number numbers object objects key keys logs user users tables dataframe lista
        archivo cadena archivos fichier liste chaîne datei zeichenkette arquivo файл массив строку числа список
        process processes commits commit branch cursor date dates""",
    # Verbs of what a program would do, at the start of a how-to or an imperative
    "v": """
        reverse sort parse check count merge remove flatten connect print iterate loop split validate read filter
        find delete rename list search compare swap concatenate dedupe deduplicate group get select join open
        download upload scrape undo revert install kill run import export access handle catch center centre align
        round format initialize instantiate plot traverse invertir ordenar leer contar trier lire inverser sortieren
        lesen umkehren zählen ler leggere ordinare""",
    "P": "in on using with en mit dans con em на usando avec för auf w",
    "t": "to into as for por per nach",
    # Prose and other things that are written but are not code
    "a": """
        poem poems poetry story stories essay essays email e-mail mail letter letters blog post posts articles
        speech play movie film video podcast song songs lyrics rap résumé cv plan lesson lessons ad ads advert
        advertisement report summary review reviews proposal description joke jokes riddle riddles limerick tweet
        tweets haiku sonnet ballad novel chapter scene dialog dialogue monologue sentence bio biography brochure pamphlet
        itinerary toast headline headlines slogan slogans tagline caption captions newsletter announcement
        invitation obituary memo rubric quiz outline title titles fable parody quote quotes verse verses press
        profile pitch statement name names recipe menu curriculum syllabus presentation flyer note notes vow vows
        eulogy poema cuento historia carta correo ensayo artículo discurso poème histoire lettre courriel discours
        gedicht geschichte brief aufsatz artikel rede conto redação poesia lettera racconto стихотворение письмо
        рассказ статью сочинение wiersz şiir mektup""",
    # Contexts in which "script", "program", "class", "code", "function" are none of ours
    "z": """
        workout fitness exercise training school students student teacher liver kidney heart conduct dress promo
        barcode zip postal area recital concert youtube tv television radio theater theatre screenplay sitcom
        loyalty volunteer mentorship undergraduate phd degree yoga pilates ballet cooking social ethics building
        penal criminal civil tax wedding meditation hypnosis rehabilitation nonprofit charity church sermon actor
        actors comedy drama marketing sales onboarding leadership travel garden""",
    # Given text and what is done to it
    "T": """
        text passage paragraph article document transcript conversation contract clause abstract excerpt
        below following feedback comments message messages statements data records order invoice""",
    "E": """
        extract identify classify categorize categorise label tag summarize summarise paraphrase annotate redact
        sentiment keywords entities takeaways bullet bullets table markdown structured tldr rate entity extrae
        clasifica resume extrais classe extrahiere klassifiziere zusammenfassung resuma riassumi""",
    "J": "json jsonl csv xml tsv",
    # Mathematics and reasoning
    "m": """
        calculate compute solve prove proof equation equations integral derivative probability polynomial theorem
        triangle rectangle radius angle prime primes divisible modulo factorial logarithm percent percentage ratio
        hypotenuse vector vectors isomorphic invertible permutation permutations remainder velocity statistics
        median mean average arithmetic algebra geometry calculus inequality sqrt matrices eigenvalue dice coin sum
        product total altogether twice half thrice reasoning puzzle logic logically deduce syllogism premise
        premises conclusion contradiction step-by-step hence vertices parabola converges diverges perimeter volume
        interest profit discount speed miles km kilometers meters hours minutes dollars cents cost costs each left
        remaining fewer quantity fraction square cube cubic maximum minimum roots derive""",
    "y": "many much",
    "f": "of about regarding",
    # Conversation
    "g": """
        hi hello hey yo sup thanks thank thx bye goodbye ok okay cool great nice lol yes no sure howdy greetings
        welcome sorry morning evening afternoon continue right wow nope yep yeah haha please""",
    "W": """
        what what's whats who who's whom whose when when's where where's which is are was were does did do should
        has have had may might am isn't aren't don't doesn't""",
    "Q": "can could will would kannst könntest können puedes podrías peux pouvez pourriez puoi pode",
    "i": """
        implement implementing implementa implementar implémente implémenter implementiere implementieren implemente
        implementare реализуй реализуйте""",
    "H": "how how's como comment wie cómo come как jak nasıl",
    "R": "pretend imagine roleplay persona act embody embrace role",
    "u": """
        i i'm i've i'd i'll me my mine we our us you your you're let's let tell remind call book schedule suggest
        advice advise tips ideas recommend recommendations help think feel want weather restaurant flight account
        bank card""",
    "O": """
        tone style rhyme rhyming rephrase reword edit proofread polish words sentences paragraphs lines compose
        draft creative engaging persuasive captivating formal informal brainstorm invent""",
}
# fmt: on
# Written without spaces: found anywhere in a text of their script.
_UNSPACED: dict[str, str] = {
    "B": """
        编写 写一个 写个 写一段 写出 写 创建 生成 帮我写 給我 给我
        書いて 作成 作って 実装 教えて ください 작성 만들어 구현 짜줘 써줘""",
    "i": "实现",
    "M": "修复 重构 优化 补全 修正 改写 修改 直して リファクタリング 수정 고쳐",
    "n": """
        函数 函數 脚本 程序 代码 查询 语句 类 算法 命令 程式 関数
        スクリプト プログラム コード クエリ クラス コマンド 함수 스크립트 코드 쿼리 프로그램 명령어""",
    "N": "正则 正則 正規表現 정규식 正则表达式",
    "X": "解释 说明 什么是 为什么 区别 介绍 説明 違い 要約 なぜ 설명 차이 왜",
    "a": "诗 故事 文章 作文 邮件 信 小说 詩 物語 メール 手紙 記事 시 이야기 편지 이메일",
    "W": "什么 吗 谁 哪 何 ですか 무엇",
}
_TOKEN = re.compile(r"[^\W\d_][\w+#'’]*|\d[\d.,]*|[.?!;:\n。？！]")
_ASCII_TOKEN = re.compile(r"[A-Za-z][\w+#']*|\d[\d.,]*|[.?!;:\n]", re.ASCII)  # the same, on ASCII text
_UNSPACED_SCRIPT = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def _invert(words: Mapping[str, str]) -> dict[str, str]:
    return {word: role for role, listed in words.items() for word in listed.split()}


_ROLES = _invert(_WORDS)
_UNSPACED_ROLES = _invert(_UNSPACED)
_UNSPACED_WORDS = re.compile("|".join(sorted(_UNSPACED_ROLES, key=len, reverse=True)) + r"|[A-Za-z][A-Za-z0-9+#]*")
_ROLES.update(_UNSPACED_ROLES)
_ROLES.update(dict.fromkeys(".?!;:\n。？！", STOP))


def tokenize(text: str) -> list[str]:
    """Return the words, numbers and ends of sentences of a text, in its own case."""
    if text.isascii():
        return _ASCII_TOKEN.findall(text)
    if _UNSPACED_SCRIPT.search(text):
        text = _UNSPACED_WORDS.sub(r" \g<0> ", text)
    return _TOKEN.findall(text)


def roles_of(tokens: list[str]) -> str:
    """Return one letter for each token, which must be in lower case."""
    lookup = _ROLES.get
    return "".join([lookup(token) or (NUMBER if token[0].isdigit() else ANY_WORD) for token in tokens])
